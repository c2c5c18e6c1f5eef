"""The GPU backend: a whole forward pass of Triton kernels, captured in graphs."""
