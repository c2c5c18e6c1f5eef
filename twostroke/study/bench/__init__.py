"""Benchmarks: latency of a model in this process (latency.py), and of a server under load (serving)."""
