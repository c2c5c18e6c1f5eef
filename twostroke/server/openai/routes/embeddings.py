"""/v1/embeddings: a clear line instead of a path that does not exist."""

from fastapi import APIRouter, Response

from twostroke.server.async_engine import CurrentEngine
from twostroke.server.engine_requests import choose_method
from twostroke.server.errors import NoEmbeddings
from twostroke.server.openai.schemas.base_model import LenientModel

router = APIRouter(prefix="/v1/embeddings")


class EmbeddingsBody(LenientModel):
    """A body of which only the model's name is read."""

    model: str | None = None


@router.post("")
async def embeddings(body: EmbeddingsBody, engine: CurrentEngine) -> Response:
    """Raises ApiError: 404 for another model, 400 for the one that is served."""
    choose_method(engine.name, body.model, None)
    raise NoEmbeddings(engine.name)
