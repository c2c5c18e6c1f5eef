"""Chats whose KV cache is extended turn by turn, in memory and in files."""

from twostroke.api.conversation.conversation import Conversation
from twostroke.api.conversation.overflow import Overflow
from twostroke.api.conversation.reply import Reply

__all__ = ["Conversation", "Overflow", "Reply"]
