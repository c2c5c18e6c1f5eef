"""Ollama's API: /api/chat, /api/generate, embeddings, and what its clients ask about models.

schemas         what clients send              translate       into the server's own form of a conversation
answers         what they get                  routes          the endpoints
models          the model that is served, and what cannot be done to it
"""
