"""Number formats of stored weights (GGUF's blocks), tensors in them, and encoding into them."""
