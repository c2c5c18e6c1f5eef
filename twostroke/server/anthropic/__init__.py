"""Anthropic's API: /v1/messages and /v1/messages/count_tokens.

schemas         what clients send              translate       into the server's own form of a conversation
answer          what they get
routes          the endpoints
"""
