"""`twostroke serve`: an OpenAI-compatible server."""

import os
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from twostroke.cli.config import print_sources
from twostroke.cli.method_options import MethodModule, load_method_modules
from twostroke.cli.options import PositionalModelOptions, spread
from twostroke.cli.report import note, tiers_text
from twostroke.cli.serve_models import SharingOptions, serve_models
from twostroke.cli.serve_options import ListeningOptions, SettingsOptions, StepOptions, require_replicas
from twostroke.errors import InvalidRequest
from twostroke.server.observability.logs import configure
from twostroke.system.extras import requires_extra
from twostroke.system.service_manager import notify

if TYPE_CHECKING:
    from twostroke.api.llm import LLM
    from twostroke.server.listener import Listener
    from twostroke.server.settings import Settings


@spread
def serve(
    *,
    listening: ListeningOptions,
    steps: StepOptions,
    settings_options: SettingsOptions,
    method_module: MethodModule = None,
    check_config: Annotated[
        bool, typer.Option("--check-config", help="Check all options, show each value and its source, and end.")
    ] = False,
    replicas: Annotated[
        int,
        typer.Option(
            rich_help_panel="Server",
            help="Engines of the model, each with its part of the cores, of one NUMA node where that is possible; a "
            "call goes to one that knows its beginning, or to the one with least to do.",
        ),
    ] = 1,
    sharing: SharingOptions,
    model_options: PositionalModelOptions,
) -> None:
    """Serve a model over HTTP to OpenAI's clients, until SIGTERM or Ctrl-C."""
    listening.check()
    if listening.log_format == "json":
        configure("json")
    from twostroke.backends.choose import follow_torchrun
    from twostroke.backends.ranks.processes import under_torchrun

    settings = settings_options.settings()
    model_options.validate(max_running=steps.max_running)
    models, shared = sharing.each(model_options) if sharing.several else [], sharing.settings()
    if not sharing.several and (of_several := sharing.given(shared)):
        raise InvalidRequest(f"{of_several} is for several models: name them (--also, --models), or leave it out")
    if models and settings.model_name is not None:
        raise InvalidRequest("--served-name is for one model: give several their names in a file (--models)")
    if replicas != 1:
        require_replicas(replicas, model_options, bool(models))
    if check_config:
        load_method_modules(method_module)
        print_sources()
        listening.place.check()
        named = ", ".join(name or one.model for name, one in models) or model_options.model
        note(f"{named} would be served at {listening.place.text()}")
        return
    if models and any(one.tp > 1 for _, one in models) and under_torchrun():
        raise InvalidRequest("under torchrun there is one model: start the server without torchrun for several")
    if model_options.tp > 1 and not models:
        follow_torchrun()  # only rank 0 listens
    listener = listening.place.open()
    if models:
        with requires_extra("serve", "serving"):
            from twostroke.server.lifecycle import end_at_signals
        end_at_signals()
        load_method_modules(method_module)
        serve_models(models, model_options, shared, steps, settings, listening, listener, method_module or ())
        return
    _serve_one(model_options, replicas, steps, settings, listening, listener, method_module)


def _serve_one(
    model_options: PositionalModelOptions,
    replicas: int,
    steps: StepOptions,
    settings: "Settings",
    listening: ListeningOptions,
    listener: "Listener",
    method_module: MethodModule,
) -> None:
    """Serve one model until a signal."""
    from twostroke.backends.ranks.processes import under_torchrun
    from twostroke.server.engine_process.launch import SPARE_BYTES, EngineProcess, SpareProcess, launch_of

    alone = model_options.tp > 1 and under_torchrun()  # ranks that lose one begin again together, by torchrun
    # First of all: the engine's process imports as much as this one does.
    process = None if alone else SpareProcess(partial(EngineProcess, "twostroke.cli.engine_opening"), replicas)
    with requires_extra("serve", "serving"):
        from twostroke.cli.engine_opening import opening_of, replicas_of
        from twostroke.server.engine_process.link import LinkOpener
        from twostroke.server.engine_process.remote import RemoteEngine
        from twostroke.server.engine_process.replicas import ReplicatedEngine
        from twostroke.server.http.loading import LoadingResponder
        from twostroke.server.lifecycle import SERVER_BYTES, end_at_signals, make_server
        from twostroke.server.served_engine import LocalEngine

    end_at_signals()
    url = f"{listener.url}/v1"
    note(f"loading {model_options.model}, to be served at {url}; until then calls are answered 503")
    with LoadingResponder(listener.sockets, listener.tls):
        load_method_modules(method_module)
        keeps = process is not None and settings.spare_engine
        server_bytes = SERVER_BYTES + SPARE_BYTES * keeps
        options = opening_of(model_options, steps, server_bytes, method_module or (), listening.log_format)
        if process is None:
            engine = LocalEngine(options.opener(**options.arguments))
        elif replicas == 1:
            engine = RemoteEngine(LinkOpener(launch_of(options, process.take)), settings.watchdog_timeout_s)
        else:
            engine = ReplicatedEngine(replicas_of(options, replicas, process.take), settings.watchdog_timeout_s)
        if process is not None and keeps:
            process.keep()
        llm = engine.llm
        if listening.log_format == "text":
            configure("text")  # from here on: until now people read notes
        server = make_server(engine, settings, listener.host, listening.port, listener.tls)
        server.warm_up()
    engines = [str(one.pid) for one in engine.parts if isinstance(one, RemoteEngine)]
    where = f"process {os.getpid()}" + (f", its engine {', '.join(engines)}" if engines else "")
    note(f"{llm!r} at {url} ({where}); {_itl_text(llm, steps)}")
    note(f"KV: {tiers_text(llm)}")
    if listener.host is not None:
        note(f"to chat, and to see the engine at work, open {listener.url}/")
    notify("READY=1")
    server.run(listener.sockets)
    listener.close()
    engine.stop()
    if alone:
        llm.close()  # what waits to be written to a tier is written, as by an engine's process
    if server.lost_at is not None:
        raise typer.Exit(1)


def _itl_text(llm: "LLM", asked: StepOptions) -> str:
    objective = llm.engine.config.itl_ms
    if objective is None:
        return "no ITL objective: long prompts may hold up streams"
    chosen = " (chosen; --itl-ms changes it)" if asked.itl_ms == "auto" else ""
    return f"ITL objective {objective:g} ms{chosen}"
