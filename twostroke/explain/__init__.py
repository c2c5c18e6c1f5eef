"""What the engine does with a prompt, step by step: every number is its own."""
