"""The kernels, compiled with sanitizers: `make test-sanitizers`."""
