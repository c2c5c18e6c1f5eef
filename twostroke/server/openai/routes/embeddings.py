"""/v1/embeddings: a clear line instead of a path that does not exist."""

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from twostroke.server.async_engine import AsyncEngine
from twostroke.server.errors import NoEmbeddings
from twostroke.server.openai.schemas.lenient import Lenient
from twostroke.server.prepare import choose_method

router = APIRouter(prefix="/v1/embeddings")


class EmbeddingsBody(Lenient):
    """What names the model; nothing else is read."""

    model: str | None = None


@router.post("")
async def embeddings(body: EmbeddingsBody, http: HttpRequest) -> Response:
    """Raises ApiError: 404 for another model, 400 for the one that is served."""
    engine: AsyncEngine = http.app.state.engine
    choose_method(engine.name, body.model, None)
    raise NoEmbeddings(engine.name)
