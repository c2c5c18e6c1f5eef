"""How the server behaves, apart from the model. The options of `twostroke serve` are made from this file."""

import re
from dataclasses import dataclass
from pathlib import Path

from twostroke.api.reasoning.forms import PARSERS
from twostroke.errors import InvalidRequest
from twostroke.fields import Checked, Rule, declare, flag, integer, number, size, text
from twostroke.server.tenants.key_file import read_keys

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+", re.IGNORECASE)
_HOST = re.compile(r"\*|\[[0-9a-fA-F:.]+\]|[\w.-]+", re.ASCII)
_ORIGINS = Rule(
    tuple,
    "Origin whose pages may call from a browser, such as https://chat.example; * for all.",
    each=Rule(str, test=lambda text: bool(_ORIGIN.fullmatch(text))),
    words="origins such as https://chat.example, without a path, or *",
)

_HOSTS = Rule(
    tuple,
    "Name under which browsers may reach a server without a key, besides localhost; * for all.",
    each=Rule(str, test=lambda text: bool(_HOST.fullmatch(text))),
    words="names of hosts, without a scheme and a port, or *",
)


@dataclass(frozen=True)
class Settings(Checked):
    """Checked on construction (InvalidRequest names the field)."""

    model_name: str | None = text(None, least=1, help="What clients call the model.")
    api_key: str | None = text(
        None, least=1, help="What clients must send as a bearer token; without one, everybody is let in."
    )
    api_key_file: str | None = text(
        None,
        least=1,
        help="File of accepted keys, `KEY` or `NAME KEY` on each line, or TOML with limits for each name; "
        "it is read again when it changes.",
    )
    allowed_hosts: tuple[str, ...] = declare((), _HOSTS)
    max_queued: int = integer(512, least=0, help="Most choices that wait besides those that run; beyond, 429.")
    max_body_bytes: int = size(8 << 20, least=1, help="Longest request body; a longer one is answered 413.")
    max_choices: int = integer(128, least=1, help="Most choices that one call may ask for, all its prompts together.")
    timeout_s: float | None = number(None, above=0, help="Seconds that a request may take if it names no timeout.")
    strict_fields: bool = flag(
        False, help="Refuse requests with fields that have no effect, instead of a warning in the answer."
    )
    when_full: str = text(
        "refuse",
        choices=("refuse", "drop", "window"),
        help="A chat without room that does not say `truncation`: refuse it, drop its oldest turns, or keep the KV of "
        "a window.",
    )
    reasoning_parser: str = text(
        "auto",
        choices=PARSERS,
        help="Form of an answer's thoughts; auto finds it in the chat template, none leaves them in the answer.",
    )
    sinks: int = integer(4, least=0, help="First KV entries that a window keeps besides the last ones.")
    drain_delay_s: float = number(
        0.0, least=0, help="Seconds after SIGTERM in which calls are still taken, while /health/ready says 503."
    )
    step_timeout_s: float = number(60.0, above=0, help="Seconds that a step may take until /health/ready says 503.")
    watchdog_timeout_s: float = number(
        300.0,
        least=0,
        help="Seconds without a step after which the engine's process counts as hung: it is killed, and the next one "
        "goes on; 0 for no limit.",
    )
    spare_engine: bool = flag(
        True, help="Keep a process without a model ready, so that an engine that dies is back a second or two sooner."
    )
    grace_s: float = number(30.0, least=0, help="Seconds that running requests have to finish at shutdown.")
    max_stored: int = integer(1000, least=0, help="Most responses kept for previous_response_id; the oldest go first.")
    max_stored_bytes: int = size(64 << 20, help="Most bytes that kept responses take, as JSON.")
    max_context_bytes: int | None = size(
        None, unset="half of what is left, 1 GiB at most", help="Most bytes of ordinary memory that contexts may hold."
    )
    receipts: str | None = text(None, least=1, help="Directory that keeps the receipts that clients ask for.")
    cors: tuple[str, ...] = declare((), _ORIGINS)
    vllm_metrics: bool = flag(False, help="Give metrics under vLLM's names too, for dashboards made for it.")
    header_timeout_s: float = number(20.0, above=0, help="Seconds to send the headers of a request in; then 408.")
    body_timeout_s: float = number(
        20.0, above=0, help="Seconds to send a body in, and 1 s more for each 16 KiB that have come; then 408."
    )
    write_timeout_s: float = number(
        60.0, above=0, help="Seconds in which a client must take some of what waits for it; then its call ends."
    )
    keep_alive_s: float = number(30.0, above=0, help="Seconds that a connection may be idle between requests.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.receipts is not None and not Path(self.receipts).expanduser().is_dir():
            raise InvalidRequest(f"receipts: there is no directory {self.receipts}: make it first")
        if self.api_key_file is not None:
            read_keys(
                Path(self.api_key_file).expanduser()
            )  # one that cannot be used is refused before a model is loaded

    @property
    def truncation(self) -> str:
        """`when_full` in the words of a request's field `truncation`."""
        return {"refuse": "disabled", "drop": "auto", "window": "window"}[self.when_full]
