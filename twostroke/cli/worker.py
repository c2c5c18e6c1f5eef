"""`twostroke worker`: a worker of NVIDIA Dynamo."""

import os
from typing import Annotated, Any

import typer

from twostroke.cli.options import MethodModule, ModelOptions, load_method_modules, spread
from twostroke.cli.report import note
from twostroke.system.extras import extra


def _worker(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Worker", **settings)


@spread
def worker(
    *,
    role: Annotated[str, _worker(help="both strokes; or prefill or decode alone.")] = "both",
    namespace: Annotated[str, _worker(help="Workers and front ends of one namespace find each other.")] = "twostroke",
    served_name: Annotated[str | None, _worker(help="What clients call the model.", show_default="its name")] = None,
    host: Annotated[str, _worker(help="Address to listen at.")] = "127.0.0.1",
    discovery: Annotated[
        str, _worker(envvar="DYN_DISCOVERY_BACKEND", help="How they do: file, etcd or kubernetes.")
    ] = "file",
    events: Annotated[
        str | None,
        _worker(envvar="DYN_EVENT_PLANE", help="Tell routers what the prefix index holds, over nats or zmq."),
    ] = None,
    max_running: Annotated[int, _worker(min=1, help="Most choices generated at once.")] = 256,
    method_module: MethodModule = None,
    model_options: ModelOptions,
) -> None:
    """Serve a model as a worker of an NVIDIA Dynamo cluster, until SIGTERM."""
    from twostroke.cluster.local import listen_at

    listen_at(os.environ, host)  # before Dynamo is imported, which reads it
    with extra("dynamo", "a worker"):
        from dynamo.common.backend.run import run

        from twostroke.cluster.worker import ROLES, Place, Worker
    if role not in ROLES:
        raise typer.BadParameter(f"one of {', '.join(ROLES)}", param_hint="--role")
    load_method_modules(method_module)
    llm = model_options.open(max_running=max_running)
    note(f"{llm!r} in namespace {namespace} (process {os.getpid()})")

    async def make(_: list[str] | None) -> Any:
        made = Worker(llm, role, Place(namespace, discovery, events, served_name))
        return made, made.config()

    with llm:
        run(Worker, engine_factory=make)
