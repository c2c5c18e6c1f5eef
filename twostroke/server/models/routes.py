"""The routes that belong to no model: the lists, what is loaded, health, and metrics."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from fastapi import Request as HttpRequest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twostroke.server import admin
from twostroke.server.http.responses import StreamedResponse, all_of, cancel_on_disconnect, json_response
from twostroke.server.models.downloads import ModelDownloads
from twostroke.server.models.served_model import ServedModel
from twostroke.server.models.served_models import ServedModels
from twostroke.server.observability.metrics import ServerMetrics, join_families
from twostroke.server.ollama.models import NamedBody, change, model_facts
from twostroke.server.ollama.models import version as ollama_version
from twostroke.server.openai.routes.models import described, listed
from twostroke.server.page.routes import file, root

FOR_EVER = timedelta(days=365)

router = APIRouter()
for path in ("/push", "/create", "/copy", "/blobs/{digest}"):
    router.post(f"/api{path}")(change)
router.get("/")(root)
router.get("/page/{name:path}")(file)
router.get("/load")(admin.load)  # of all models
router.get("/version")(admin.version)
router.get("/api/version")(ollama_version)


async def served_models(http: HttpRequest) -> ServedModels:
    """The models of the application that has been called."""
    return http.app.state.engine


Models = Annotated[ServedModels, Depends(served_models)]


@router.get("/v1/models")
async def list_models(models: Models) -> Response:
    """Those that the caller's key may use, each once, loaded or not."""
    return listed([_described(models, model, model.name) for model in models.allowed])


@router.get("/v1/models/{name:path}")
async def look_up(name: str, models: Models) -> Response:
    """A model under any name that it has: `NAME`, `NAME:METHOD`, `NAME:latest`. 404 for any other."""
    return json_response(_described(models, models.find(name), name))


def _described(models: ServedModels, model: ServedModel, name: str) -> dict[str, Any]:
    room = model.source.config.max_position if model.engine is None else model.engine.llm.max_model_len
    return described(name, model.name, models.created, room) | {"status": {"value": model.state}}


@router.get("/api/tags")
async def tags(models: Models) -> Response:
    """Those that the caller's key may use."""
    return json_response({"models": [_facts(model) for model in models.allowed]})


@router.get("/api/ps")
async def loaded(models: Models) -> Response:
    """Those of them that are loaded, and when each leaves if no call comes."""
    shown: list[dict[str, Any]] = []
    for model in models.allowed:
        if model.loaded and model.engine is not None:
            stays = FOR_EVER if model.expires_in_s > FOR_EVER.total_seconds() else timedelta(seconds=model.expires_in_s)
            expires = (datetime.now(UTC) + stays).isoformat()
            status = {"expires_at": expires, "size_vram": 0, "context_length": model.engine.llm.max_model_len}
            shown.append(_facts(model) | status | {"size": model.wanted_bytes})
    return json_response({"models": shown})


def _facts(model: ServedModel) -> dict[str, Any]:
    return model_facts(model.name, model.source.path, model.source.config) | {"size": model.source.file_bytes}


@router.post("/api/pull")
async def pull(body: NamedBody, http: HttpRequest) -> Response:
    """Fetch a model of the catalog, which can be asked for from then on; nothing to do for one that is there."""
    downloads: ModelDownloads = http.app.state.downloads
    if (download := downloads.pull(body.model)) is not None:
        if body.stream:
            return StreamedResponse(download.lines(), "application/x-ndjson")
        await cancel_on_disconnect(http.receive, all_of(download.updates()))  # it goes on without the client
    return json_response({"status": "success"})


@router.delete("/api/delete")
async def delete(body: NamedBody, http: HttpRequest) -> Response:
    """Unload a model that was downloaded, and remove its file."""
    await http.app.state.downloads.delete(body.model)
    return Response()


@router.get("/health")
@router.get("/health/ready")
@router.get("/ping")
@router.post("/ping")
async def ready(models: Models) -> Response:
    """200 while new calls should be sent here. A model that fails is no reason for 503: the others go on."""
    return _health(models, not (models.leaving or models.draining))


@router.get("/health/live")
async def live(models: Models) -> Response:
    """200 while the server lives."""
    return _health(models, True)


def _health(models: ServedModels, fine: bool) -> Response:
    states = {model.name: model.state for model in models.all.values()}
    draining = models.leaving or models.draining
    body = {"live": True, "ready": not draining, "draining": draining, "in_flight": models.in_flight, "models": states}
    return json_response(body, 200 if fine else 503)


@router.get("/metrics")
async def metrics(http: HttpRequest, models: Models) -> Response:
    """The metrics of all models, in Prometheus' text format or in OpenMetrics, as the header Accept asks."""
    for model in list(models.all.values()):
        if (engine := model.engine) is not None:  # of one that has left, what was read last
            engine.metrics.families = await engine.families() if model.loaded else engine.metrics.families or ()
    server: ServerMetrics = http.app.state.metrics
    return server.exposition(ModelsCollector(models), http.headers.get("accept", ""))


class ModelsCollector(Collector):
    """The families of all models, joined by name, each with the label `model`.

    It has as many values as the server has models. Series of a model exist once it was loaded, and stay.
    """

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        loaded = GaugeMetricFamily("twostroke_model_loaded", "Whether a model is loaded", labels=["model"])
        loads = CounterMetricFamily("twostroke_model_loads", "How often a model was loaded", labels=["model"])
        running = GaugeMetricFamily("twostroke_model_calls", "Calls of a model", labels=["model", "state"])
        joined: dict[str, Metric] = {}
        for model in self._models.all.values():
            loaded.add_metric([model.name], model.loaded)
            loads.add_metric([model.name], model.loads)
            running.add_metric([model.name, "running"], model.running)
            running.add_metric([model.name, "waiting"], len(model.waiting))
            if model.engine is not None:
                for family in model.engine.metrics.exported.collect():
                    own = {} if family.name.startswith("vllm:") else {"model": model.name}  # vLLM's have model_name
                    join_families(joined, [family], own)
        yield from (loaded, loads, running, *joined.values())
