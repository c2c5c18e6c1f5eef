"""Contexts: beginnings of prompts that a client names once, and whose KV is held until they expire."""
