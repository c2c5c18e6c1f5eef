"""The native CPU backend: the Python side of the compiled libraries in `native/`."""
