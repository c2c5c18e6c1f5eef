"""What every API answers to a request for embeddings."""

from twostroke.server.async_engine import AsyncEngine
from twostroke.server.errors import ApiError


def no_embeddings(engine: AsyncEngine) -> ApiError:
    """The error: the engine computes hidden states for its next token alone, and pools none."""
    message = f"this server gives no embeddings: it generates text with {engine.name}"
    return ApiError(400, message, code="no_embeddings")
