"""What users import: `LLM`, `AsyncLLM`, `Conversation`, and what their calls return."""
