"""Chats whose KV cache is extended turn by turn, in memory and in files."""

from twostroke.api.conversation.conversation import Conversation, Reply
from twostroke.api.conversation.overflow import Overflow

__all__ = ["Conversation", "Overflow", "Reply"]
