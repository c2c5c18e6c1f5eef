"""Tensor parallelism."""
