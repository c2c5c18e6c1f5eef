"""Chats whose KV cache is extended turn by turn, in memory and in files."""

from twostroke.conversation.conversation import Conversation, Reply

__all__ = ["Conversation", "Reply"]
