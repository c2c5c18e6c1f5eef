"""How the server behaves, apart from the model."""

from dataclasses import dataclass

from twostroke.errors import InvalidRequest


@dataclass(frozen=True)
class Settings:
    """Checked on construction (InvalidRequest names the field).

    Attributes:
        model_name: what clients call the model; None for its own name.
        api_key: what clients must send as a bearer token; None lets everybody in.
        max_queued: choices that may wait besides those that run; what comes beyond is answered 429.
        max_body_bytes: longest request body; a longer one is answered 413 before it is read.
        max_choices: most answers that one request may ask for, all its prompts together.
        timeout_s: deadline of a request that names none itself, in seconds; None for no deadline.
        grace_s: how long what runs at shutdown may go on, in seconds, before it is cancelled.
    """

    model_name: str | None = None
    api_key: str | None = None
    max_queued: int = 512
    max_body_bytes: int = 8 << 20
    max_choices: int = 128
    timeout_s: float | None = None
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        self._require("max_queued", self.max_queued >= 0, "0 or more")
        self._require("max_body_bytes", self.max_body_bytes >= 1, "at least 1")
        self._require("max_choices", self.max_choices >= 1, "at least 1")
        self._require("timeout_s", self.timeout_s is None or self.timeout_s > 0, "above 0, or None")
        self._require("grace_s", self.grace_s >= 0, "0 or more")
        self._require("api_key", self.api_key is None or self.api_key != "", "not empty")

    def _require(self, name: str, fine: bool, wanted: str) -> None:
        if not fine:
            raise InvalidRequest(f"{name} must be {wanted}, not {getattr(self, name)!r}")
