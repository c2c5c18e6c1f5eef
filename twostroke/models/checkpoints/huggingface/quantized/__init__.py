"""Quantized Hugging Face directories: several tensors for a matrix, in each method's own form."""
