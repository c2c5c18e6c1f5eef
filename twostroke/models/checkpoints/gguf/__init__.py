"""GGUF files: metadata and tensors (`file`), in one file or several (`parts`), as a config and as a tokenizer."""
