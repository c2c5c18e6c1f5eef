"""Chats whose KV cache is extended turn by turn, in memory and in files."""

from twostroke.conversation.conversation import Conversation, Reply
from twostroke.conversation.overflow import Overflow

__all__ = ["Conversation", "Overflow", "Reply"]
