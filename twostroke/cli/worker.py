"""`twostroke worker`: a worker of NVIDIA Dynamo."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from twostroke.cli.method_options import MethodModule, load_method_modules
from twostroke.cli.options import PositionalModelOptions, choice_settings, option, spread
from twostroke.cli.parsers import parse_host
from twostroke.cli.report import note
from twostroke.engine.options import LLMOptions
from twostroke.fields import rules
from twostroke.system.extras import requires_extra

_worker = partial(typer.Option, rich_help_panel="Worker")


@spread
def worker(
    *,
    role: Annotated[
        str, _worker(help="Both strokes, or one alone.", **choice_settings(("both", "prefill", "decode")))
    ] = "both",
    namespace: Annotated[str, _worker(help="Workers and front ends of one namespace find each other.")] = "twostroke",
    served_name: Annotated[str | None, _worker(help="What clients call the model.", show_default="its name")] = None,
    host: Annotated[
        str, _worker(parser=parse_host, metavar="ADDRESS", help="Address to listen at; 0.0.0.0 for all.")
    ] = "127.0.0.1",
    discovery: Annotated[
        str,
        _worker(envvar="DYN_DISCOVERY_BACKEND", help="How they do.", **choice_settings(("file", "etcd", "kubernetes"))),
    ] = "file",
    events: Annotated[
        str | None,
        _worker(
            envvar="DYN_EVENT_PLANE",
            help="Tell routers what the prefix index holds.",
            show_default="off",
            **choice_settings(("nats", "zmq")),
        ),
    ] = None,
    as_student: Annotated[
        bool, _worker("--as-student", help="The model is the student of the prefill workers' model (OverFill).")
    ] = False,
    transport: Annotated[
        str, _worker(help="How values go between workers.", **choice_settings(("auto", "nixl", "tcp")))
    ] = "auto",
    cards: Annotated[
        Path | None, _worker(help="A directory for the model's card.", show_default="in this user's data")
    ] = None,
    max_running: Annotated[int, option(rules(LLMOptions)["max_running"], panel="Worker")] = LLMOptions.max_running,
    method_module: MethodModule = None,
    model_options: PositionalModelOptions,
) -> None:
    """Serve a model as a worker of an NVIDIA Dynamo cluster, until SIGTERM."""
    model_options.validate()
    from twostroke.cluster.environment import set_environment
    from twostroke.cluster.wire.transport import Choice, open_transport

    set_environment(os.environ, host)  # before Dynamo is imported, which reads it
    with requires_extra("dynamo", "a worker (docs/cluster.md tells of one more package)"):
        from dynamo.common.backend.run import run  # pyright: ignore[reportMissingImports]

        from twostroke.cluster.worker import MODES, DynamoWorker, WorkerAddress
    if events is not None:
        with requires_extra("dynamo", "--events"):
            import zmq  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
    if role not in MODES:
        raise typer.BadParameter(f"one of {', '.join(MODES)}", param_hint="--role")
    if transport not in get_args(Choice):
        raise typer.BadParameter(f"one of {', '.join(get_args(Choice))}", param_hint="--transport")
    load_method_modules(method_module)
    llm = model_options.open(max_running=max_running)
    pages = None if role == "both" else open_transport(cast("Choice", transport), llm.pool)
    note(f"{llm!r} in namespace {namespace} (process {os.getpid()})")

    address = WorkerAddress(namespace, discovery, events, host, served_name, cards)
    made = DynamoWorker(llm, role, address, student=as_student, transport=pages)

    async def make(_: list[str] | None) -> Any:
        return made, made.config()

    made.leave_on_signals()
    with llm:
        try:
            run(DynamoWorker, engine_factory=make)
        except Exception:  # Dynamo's, around one of ours
            if made.refused is not None:
                raise made.refused from None
            raise
    if made.failed:
        raise typer.Exit(1)
