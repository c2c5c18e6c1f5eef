"""The machine: its cores, mapped files, memory that is used again, and a description for measurements."""
