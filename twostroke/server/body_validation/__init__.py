"""Long bodies are tried out in another process first: `supervisor` keeps that process, `worker` runs in it."""
