"""`twostroke serve`: an OpenAI-compatible server."""

import math
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke.cli.options import MethodModule, ModelOptions, load_method_modules, option, parse_size, spread
from twostroke.cli.report import note, tiers_text
from twostroke.fields import rules
from twostroke.server.settings import Settings
from twostroke.system.extras import extra

if TYPE_CHECKING:
    from twostroke.llm import LLM


def _server(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Server", **settings)


def _setting(name: str, **settings: Any) -> Any:
    """An option that is a field of `Settings`."""
    return option(rules(Settings)[name], panel="Server", **settings)


def parse_itl(text: str) -> float | str:
    """`auto`, `off`, or milliseconds, as a number of at least 1."""
    if text in ("auto", "off"):
        return text
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = 0.0
    if not 1 <= milliseconds < math.inf:
        raise typer.BadParameter(f"{text!r} is not auto, off, or a number of milliseconds of at least 1")
    return milliseconds


@spread
def serve(
    *,
    host: Annotated[str, _server(help="Address to listen at; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, _server(min=0, max=65535, help="Port to listen at.")] = 8000,
    served_name: Annotated[str | None, _setting("model_name", show_default="its name")] = None,
    api_key: Annotated[str | None, _setting("api_key", envvar="TWOSTROKE_API_KEY")] = None,
    max_running: Annotated[int, _server(min=1, help="Most choices generated at once.")] = 256,
    itl_ms: Annotated[
        Any,
        _server(
            parser=parse_itl,
            metavar="MS|auto|off",
            help="Milliseconds between tokens that prompts must leave; auto measures a step, off is for throughput.",
        ),
    ] = "auto",
    max_queued: Annotated[int, _setting("max_queued")] = Settings.max_queued,
    max_body: Annotated[Any, _setting("max_body_bytes", parser=parse_size, metavar="SIZE")] = "8MiB",
    max_stored: Annotated[int, _setting("max_stored")] = Settings.max_stored,
    max_stored_bytes: Annotated[Any, _setting("max_stored_bytes", parser=parse_size, metavar="SIZE")] = "64MiB",
    max_context_bytes: Annotated[Any, _setting("max_context_bytes", parser=parse_size, metavar="SIZE")] = "1GiB",
    timeout: Annotated[float | None, _setting("timeout_s", show_default="no limit")] = None,
    cors: Annotated[list[str] | None, _setting("cors", metavar="ORIGIN")] = None,
    vllm_metrics: Annotated[bool, _setting("vllm_metrics")] = False,
    strict_fields: Annotated[bool, _setting("strict_fields")] = False,
    when_full: Annotated[str, _setting("when_full")] = Settings.when_full,
    sinks: Annotated[int, _setting("sinks")] = Settings.sinks,
    grace: Annotated[float, _setting("grace_s")] = Settings.grace_s,
    header_timeout: Annotated[float, _setting("header_timeout_s")] = Settings.header_timeout_s,
    body_timeout: Annotated[float, _setting("body_timeout_s")] = Settings.body_timeout_s,
    keep_alive: Annotated[float, _setting("keep_alive_s")] = Settings.keep_alive_s,
    log_format: Annotated[str, _server(help="text or json.")] = "text",
    method_module: MethodModule = None,
    model_options: ModelOptions,
) -> None:
    """Serve a model over HTTP to OpenAI's clients, until SIGTERM or Ctrl-C."""
    if log_format not in ("text", "json"):
        raise typer.BadParameter("text or json", param_hint="--log-format")
    from twostroke.backends.choose import follow_torchrun

    with extra("serve", "serving"):
        from twostroke.server.http.loading import LoadingPage
        from twostroke.server.listen import address_text, end_at_signals, listen, make_server
        from twostroke.server.observability.logs import configure

    settings = Settings(
        model_name=served_name,
        api_key=api_key or None,
        max_queued=max_queued,
        max_body_bytes=max_body,
        max_stored=max_stored,
        max_stored_bytes=max_stored_bytes,
        max_context_bytes=max_context_bytes,
        timeout_s=timeout,
        cors=tuple(cors or ()),
        vllm_metrics=vllm_metrics,
        strict_fields=strict_fields,
        when_full=when_full,
        sinks=sinks,
        grace_s=grace,
        header_timeout_s=header_timeout,
        body_timeout_s=body_timeout,
        keep_alive_s=keep_alive,
    )
    if model_options.tp > 1:
        follow_torchrun()  # only rank 0 listens
    end_at_signals()
    sockets = listen(host, port)
    url = f"http://{address_text(host, sockets[0].getsockname()[1])}/v1"
    note(f"loading {model_options.model}, to be served at {url}; until then calls are answered 503")
    with LoadingPage(sockets):
        load_method_modules(method_module)
        llm = model_options.open(max_running=max_running, itl_ms=itl_ms if isinstance(itl_ms, float) else None)
        if itl_ms == "auto":
            llm.engine.choose_itl()
        configure(log_format)
        server = make_server(llm, settings, host, port)
        server.warm()
    note(f"{llm!r} at {url} (process {os.getpid()}); {_itl_text(llm, itl_ms)}")
    note(f"KV: {tiers_text(llm)}")
    note(f"to chat, and to see the engine at work, open {url.removesuffix('v1')}")
    with llm:
        server.run(sockets)
    if server.lost_at is not None:
        raise typer.Exit(1)


def _itl_text(llm: "LLM", asked: float | str) -> str:
    objective = llm.engine.config.itl_ms
    if objective is None:
        return "no ITL objective: long prompts may hold up streams"
    chosen = " (chosen; --itl-ms changes it)" if asked == "auto" else ""
    return f"ITL objective {objective:g} ms{chosen}"
