"""Backends: their interface, the memory of pages, the choice of a backend, and the two implementations."""
