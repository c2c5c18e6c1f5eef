"""From a call to the routes of the model that it names, which is loaded for it."""

from starlette.types import Message, Receive, Scope, Send

from twostroke.server.body_validation.supervisor import HttpCall, Reply
from twostroke.server.http.paths import RouteTable
from twostroke.server.http.responses import cancel_on_disconnect
from twostroke.server.models.asked_model import AskedModel
from twostroke.server.models.served_models import ServedModels
from twostroke.server.ollama.generate import nothing_asked

# Calls that need no engine: they are answered from what stays when a model leaves.
WITHOUT_ENGINE = ("/v1/responses/", "/methods", "/props", "/slots", "/page/", "/tokenize", "/detokenize", "/api/show")
LOOKING = {"/watch"}  # streams that load no model, and keep none from leaving


class ModelDispatcher:
    """Serves the calls that belong to a model. Errors are ApiError's, in whose form the middleware sends them."""

    def __init__(self, models: ServedModels, paths: RouteTable) -> None:
        self._models, self._paths = models, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._paths.serves(scope):
            raise self._paths.not_found(scope)
        messages: list[Message] = [await receive()]  # the whole body, which the middleware has read
        asked = await AskedModel.of(scope, messages[0].get("body", b""))
        model = self._models.find(asked.name)

        async def replayed() -> Message:
            return messages.pop() if messages else await receive()

        path = scope["path"]
        if asked.unloads and model.state == "unloaded":
            await nothing_asked(path, asked.name or model.name, "unload")(scope, receive, send)
            return
        if path in LOOKING:
            await cancel_on_disconnect(receive, self._models.until_loaded(model))
        elif model.app is None or not path.startswith(WITHOUT_ENGINE):
            await cancel_on_disconnect(receive, self._models.enter(model, asked.keep_s))
            try:
                assert model.app is not None
                await model.app({**scope, "keep_s": asked.keep_s}, replayed, send)
            finally:
                self._models.leave(model)
            return
        assert model.app is not None
        await model.app(scope, replayed, send)

    async def validate(self, call: HttpCall) -> Reply | None:
        """What the routes of the model that a long body names say of it, see `BodyValidator`. Raises ApiError."""
        model = self._models.find((await AskedModel.of(call.scope, call.body)).name)
        async with self._models.using(model):
            assert model.engine is not None
            return await model.engine.body_validator.validate(call)
