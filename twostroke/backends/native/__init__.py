"""The native CPU backend: Python's side of the compiled libraries in `native/`."""
