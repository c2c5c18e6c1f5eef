"""How the server behaves, apart from the model. The options of `twostroke serve` are made from this file."""

from dataclasses import dataclass

from twostroke.fields import Checked, integer, number, text


@dataclass(frozen=True)
class Settings(Checked):
    """Checked on construction (InvalidRequest names the field)."""

    model_name: str | None = text(None, help="What clients call the model.")
    api_key: str | None = text(
        None, least=1, help="What clients must send as a bearer token; without one, everybody is let in."
    )
    max_queued: int = integer(512, least=0, help="Most choices that wait besides those that run; beyond, 429.")
    max_body_bytes: int = integer(8 << 20, least=1, help="Longest request body; a longer one is answered 413.")
    max_choices: int = integer(128, least=1, help="Most choices that one call may ask for, all its prompts together.")
    timeout_s: float | None = number(None, above=0, help="Seconds that a request may take if it names no timeout.")
    grace_s: float = number(30.0, least=0, help="Seconds that running requests have to finish at shutdown.")
    header_timeout_s: float = number(20.0, above=0, help="Seconds to send the headers of a request in; then 408.")
    body_timeout_s: float = number(
        20.0, above=0, help="Seconds to send a body in, and 1 s more for each 16 KiB that have come; then 408."
    )
    keep_alive_s: float = number(30.0, above=0, help="Seconds that a connection may be idle between requests.")
