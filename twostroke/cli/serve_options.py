"""Options of `twostroke serve`: where it listens, how much runs at once, and how the server behaves."""

import math
import re
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import typer

from twostroke.cli.options import ModelOptions, choice_settings, option, options_of
from twostroke.cli.parsers import parse_host
from twostroke.engine.options import LLMOptions
from twostroke.errors import InvalidRequest
from twostroke.fields import Rule, rules
from twostroke.server.listener import Place
from twostroke.server.settings import Settings
from twostroke.system.limits import usable_cores

PANEL = "Server"
LOG_FORMATS = ("text", "json")
_server = partial(typer.Option, rich_help_panel=PANEL)


def parse_mode(text: str) -> str:
    """Permissions of a file in octal digits, as chmod takes them."""
    if not re.fullmatch("0?[0-7]{3}", text):
        raise typer.BadParameter(f"{text!r} is not three octal digits, such as 660")
    return text


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


@dataclass(frozen=True)
class ListeningOptions:
    """Where it listens, and what it writes about it."""

    host: Annotated[
        str, _server(parser=parse_host, metavar="ADDRESS", help="Address to listen at; 0.0.0.0 for all.")
    ] = "127.0.0.1"
    port: Annotated[int, _server(min=0, max=65535, help="Port to listen at.")] = 8000
    uds: Annotated[
        str | None, _server(metavar="PATH", help="Listen at a unix socket of this path, and not at host and port.")
    ] = None
    uds_mode: Annotated[
        str, _server(parser=parse_mode, metavar="MODE", help="Permissions of the unix socket; 660 lets a group in.")
    ] = "600"
    ssl_certfile: Annotated[
        str | None, _server(metavar="FILE", help="Serve TLS with this certificate, in PEM form with those above it.")
    ] = None
    ssl_keyfile: Annotated[
        str | None, _server(metavar="FILE", help="Key of the certificate, where its file does not have it.")
    ] = None
    log_format: Annotated[str, _server(help="Form of the log.", **choice_settings(LOG_FORMATS))] = "text"

    @property
    def place(self) -> Place:
        """Where to listen."""
        return Place(self.host, self.port, self.uds, int(self.uds_mode, 8), self.ssl_certfile, self.ssl_keyfile)

    def check(self) -> None:
        """Raise BadParameter for a format of the log that is not known."""
        if self.log_format not in LOG_FORMATS:
            raise typer.BadParameter(" or ".join(LOG_FORMATS), param_hint="--log-format")


@dataclass(frozen=True)
class StepOptions:
    """What shares a step."""

    max_running: Annotated[int, option(rules(LLMOptions)["max_running"], panel=PANEL)] = LLMOptions.max_running
    itl_ms: Annotated[
        Any,
        _server(
            parser=parse_itl,
            metavar="MS|auto|off",
            help="Milliseconds between tokens that prompts must leave; auto measures a step, off is for throughput.",
        ),
    ] = "auto"

    @property
    def objective(self) -> float | None:
        """Milliseconds, if a number was given."""
        return self.itl_ms if isinstance(self.itl_ms, float) else None


def _spelled(name: str, rule: Rule) -> dict[str, Any]:
    """How an option of `Settings` is spelled: without the unit of seconds, and a switch in both of its forms."""
    flag = name.removesuffix("_s").replace("_", "-")
    return {"names": (f"--{flag}/--no-{flag}" if rule.kind is bool else f"--{flag}",)}


_CHANGES: dict[str, dict[str, Any]] = {
    "model_name": {"names": ("--served-name",), "show_default": "its name"},
    "api_key": {"envvar": "TWOSTROKE_API_KEY"},
    "max_body_bytes": {"names": ("--max-body",)},
    "timeout_s": {"show_default": "no limit"},
    "cors": {"metavar": "ORIGIN"},
    "allowed_hosts": {"names": ("--allowed-host",), "metavar": "HOST"},
    "api_key_file": {"metavar": "FILE"},
    "receipts": {"metavar": "DIR"},
}


@dataclass(frozen=True)
class SettingsOptions(
    options_of(
        Settings,
        PANEL,
        leave_out=("max_choices",),
        changes={name: _spelled(name, rule) | _CHANGES.get(name, {}) for name, rule in rules(Settings).items()},
    )
):
    """How the server behaves, apart from the model."""

    def settings(self) -> Settings:
        """Checked: raises InvalidRequest naming the field that is out of range."""
        several = {name: tuple(getattr(self, name) or ()) for name in ("cors", "allowed_hosts")}
        given: dict[str, Any] = asdict(self) | several
        return Settings(**given)


def require_replicas(count: int, options: ModelOptions, several: bool) -> None:
    """Raise InvalidRequest, one line, for replicas that cannot be."""
    cores = usable_cores()
    if not 1 <= count <= cores:
        raise InvalidRequest(f"--replicas must be from 1 to {cores}, the cores that this process may use, not {count}")
    if count == 1:
        return
    if several:
        raise InvalidRequest("--replicas is for one model: leave it out with several")
    if options.tp > 1:
        raise InvalidRequest("--replicas and --tp both share out the cores: leave one of them out")
    if str(options.device) != "cpu" or options.backend == "triton":
        raise InvalidRequest("--replicas share out the cores of a CPU: start a server for each GPU instead")
