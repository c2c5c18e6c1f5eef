"""The PyTorch reference: readable, on any torch device. Every other backend is tested against it."""
