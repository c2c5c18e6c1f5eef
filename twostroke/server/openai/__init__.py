"""OpenAI's API: completions, chat completions, responses and models; with vLLM's /tokenize and /detokenize.

schemas         what clients send          constraints     the grammar that a body asks for
answers         what they get              routes          the endpoints
"""
