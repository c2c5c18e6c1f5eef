"""Long bodies are validated in another process first: `supervisor` keeps that process, `worker` runs in it."""
