"""Ranks: processes that compute one model together (tensor parallelism), and which part of it each has."""
