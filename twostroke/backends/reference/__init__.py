"""The PyTorch reference: readable, on any torch device, what every other backend is tested against."""
