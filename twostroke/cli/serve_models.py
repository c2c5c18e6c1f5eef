"""`twostroke serve` with several models: which ones, with which options, and their server."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer.core import TyperCommand

from twostroke.cli.config import read_toml, source_of
from twostroke.cli.options import PositionalModelOptions, option, options_of
from twostroke.cli.parsers import parse_size
from twostroke.cli.report import ProgressDisplay, note
from twostroke.cli.serve_options import ListeningOptions, StepOptions
from twostroke.engine.options import LLMOptions
from twostroke.errors import InvalidRequest
from twostroke.fields import Rule, rules
from twostroke.server.models.settings import SharingSettings
from twostroke.server.observability.logs import configure
from twostroke.system.service_manager import notify

if TYPE_CHECKING:
    from twostroke.server.listener import Listener
    from twostroke.server.settings import Settings

PANEL = "Several models"
OF_EACH = rules(LLMOptions).keys() - {"max_running", "itl_ms"}


class ServeCommand(TyperCommand):
    """`serve`, in which `--model` may be repeated: each one after the first is `--also`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, further_models(args))


def further_models(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--also` for each `--model` and `-m` after the first; "--" ends options."""
    made, seen = list(arguments), False
    for i, argument in enumerate(arguments[: made.index("--") if "--" in made else None]):
        name, equals, value = argument.partition("=")
        if name in ("--model", "-m"):
            made[i] = f"--also{equals}{value}" if seen else argument
            seen = True
    return made


@dataclass(frozen=True)
class SharingOptions(
    options_of(
        SharingSettings,
        PANEL,
        changes={
            "unload_after_s": {"names": ("--unload-after",)},
            "manage_models": {"names": ("--manage-models/--no-manage-models",)},
        },
    )
):
    """Which models share the server, and how."""

    also: Annotated[
        list[str] | None,
        option(
            Rule(str, "Serve this model too, loaded when it is asked for. May be repeated.", unset="none"),
            panel=PANEL,
            metavar="MODEL",
        ),
    ] = None
    models: Annotated[
        str | None,
        option(
            Rule(str, "Serve the models of this TOML file: a table [NAME] for each, with its options.", unset="none"),
            panel=PANEL,
            metavar="FILE",
        ),
    ] = None

    @property
    def several(self) -> bool:
        """Whether there are models besides the one of the other options."""
        return bool(self.also or self.models or self.manage_models)

    def settings(self) -> SharingSettings:
        """Checked: raises InvalidRequest naming the field that is out of range."""
        return SharingSettings(**{name: getattr(self, name) for name in rules(SharingSettings)})

    def given(self, settings: SharingSettings) -> str:
        """The first option that is not what it is by default, or ""."""
        changed = (name for name, value in vars(SharingSettings()).items() if getattr(settings, name) != value)
        return next((f"--{name.removesuffix('_s').replace('_', '-')}" for name in changed), "")

    def each(self, common: PositionalModelOptions) -> list[tuple[str | None, PositionalModelOptions]]:
        """The options of each model, and its name where the file gives one. Raises InvalidRequest."""
        named = common.model_argument is not None or source_of("model") != "default" or not self.models
        first = [common.model] if named else []
        found: list[tuple[str | None, PositionalModelOptions]] = [
            (None, with_model(common, name)) for name in (*first, *(self.also or ()))
        ]
        found += _of_file(Path(self.models).expanduser(), common) if self.models else []
        there = {known for name, one in found for known in (name, one.model)}
        if self.manage_models:
            found += [(None, with_model(common, name)) for name in fetched() if name not in there]
        for _, one in found:
            one.validate()
        return found


def with_model(options: PositionalModelOptions, name: str) -> PositionalModelOptions:
    """The same options for another model."""
    return replace(options, model=name, model_argument=None)


def fetched() -> list[str]:
    """The models of the catalog whose files are there."""
    from twostroke.models.checkpoints.catalog import CATALOG
    from twostroke.models.checkpoints.fetch import is_fetched

    return [entry.name for entry in CATALOG.values() if is_fetched(entry)]


def _of_file(path: Path, common: PositionalModelOptions) -> Iterator[tuple[str, PositionalModelOptions]]:
    if not (tables := read_toml(path)):
        raise InvalidRequest(f"{path}: there is no model: give each a table [NAME]")
    for name, table in tables.items():
        if not name.strip():
            raise InvalidRequest(f"{path}: a table has no name, by which clients call its model")
        if not isinstance(table, dict):
            raise InvalidRequest(f"{path}: {name} must be a table, [{name}], with options of a model")
        values = {key.replace("-", "_"): value for key, value in table.items()}
        if unknown := values.keys() - OF_EACH:
            raise InvalidRequest(f"{path}: there is no option {min(unknown)} of a model ([{name}])")
        for key, value in values.items():
            if rules(LLMOptions)[key].unit == "bytes" and isinstance(value, str):
                values[key] = parse_size(value)
        yield name, replace(common, **{"model": name, "model_argument": None} | values)


def serve_models(
    models: Sequence[tuple[str | None, PositionalModelOptions]],
    common: PositionalModelOptions,
    sharing: SharingSettings,
    steps: StepOptions,
    settings: "Settings",
    listening: ListeningOptions,
    listener: "Listener",
    method_modules: Sequence[str],
) -> None:
    """Serve several models until a signal. Models that come later have the options `common`."""
    from twostroke.server.engine_process.launch import SPARE_BYTES, EngineProcess, SpareProcess, launch_of

    spare = SpareProcess(partial(EngineProcess, "twostroke.cli.engine_opening"))  # its imports go on beside ours
    from twostroke.cli.engine_opening import opening_of
    from twostroke.models.checkpoints.progress import Progress
    from twostroke.models.checkpoints.resolve import open_checkpoint
    from twostroke.server.http.loading import LoadingResponder
    from twostroke.server.lifecycle import SERVER_BYTES, http_server
    from twostroke.server.models.app import create_models_app
    from twostroke.server.models.source import ModelSource

    def source(name: str | None, options: PositionalModelOptions, progress: Progress) -> ModelSource:
        opening = opening_of(options, steps, server_bytes, method_modules, listening.log_format)
        checkpoint = open_checkpoint(options.model, progress=progress)
        return ModelSource.of(checkpoint, launch_of(opening, spare.take), options.kv_bytes, name)

    def first(name: str | None, options: PositionalModelOptions) -> ModelSource:
        with ProgressDisplay(f"looking at {options.model}", announced=True) as progress:
            return source(name, options, progress)

    def later(name: str, progress: Progress) -> ModelSource:
        return source(None, with_model(common, name), progress)

    server_bytes = SERVER_BYTES + SPARE_BYTES * settings.spare_engine
    if settings.spare_engine:
        spare.keep()
    url = f"{listener.url}/v1"
    note(f"{len(models)} models, to be served at {url}; until then calls are answered 503")
    with LoadingResponder(listener.sockets, listener.tls):
        sources = [first(name, options) for name, options in models]
        app = create_models_app(sources, sharing, settings, listener.host, later if sharing.manage_models else None)
        server = http_server(app, settings, listener.host, listening.port, listener.tls)
    if listening.log_format == "text":
        configure("text")  # from here on: until now people read notes
    note(f"{', '.join(one.name for one in sources)} at {url} (process {os.getpid()}); each is loaded when it is used")
    notify("READY=1")
    server.run(listener.sockets)
    listener.close()
