"""Backends: the interface that one fills, memory of pages, the choice of one, and the two there are."""
