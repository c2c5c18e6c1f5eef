"""Hugging Face directories: `directory` opens one, from config.json, tokenizer.json and safetensors files."""
