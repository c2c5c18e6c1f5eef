"""Twostroke: an LLM inference engine of two strokes whose KV cache is a value you hold."""
