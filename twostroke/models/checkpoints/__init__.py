"""Checkpoints: GGUF files and Hugging Face directories, opened without decoding anything, and the catalog of models."""
