"""The machine: its cores, memory-mapped files, reused memory, and a description for measurements."""
