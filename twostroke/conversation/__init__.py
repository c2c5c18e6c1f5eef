"""A chat whose KV value is extended turn by turn, in memory and in a file."""

from twostroke.conversation.conversation import Conversation, Reply

__all__ = ["Conversation", "Reply"]
