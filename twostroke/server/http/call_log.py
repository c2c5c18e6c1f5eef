"""What is recorded about one HTTP call: its line in the log, and the warnings in its answer."""

import re
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from twostroke.api.conversation.fitting import LeftOut
from twostroke.engine.request import Request
from twostroke.server.observability.outcome import finish_reasons, output_tokens


@dataclass
class CallLog:
    """One call, from its arrival to its end. `call_log` finds that of an ASGI scope."""

    method: str
    path: str
    status: int | None = None
    key: str | None = None  # the name of the API key that was sent, where keys have names
    model: str | None = None  # what the client called the model
    # the engine's, once they are made. What they have computed is logged, however the call ends.
    requests: Sequence[Request] = ()
    warnings: list[str] = field(default_factory=list)  # sentences for the caller about what had no effect
    left_out: dict[str, int] = field(default_factory=dict)  # counts of what is not in the prompt
    client: str | None = None  # "gone" if the client closed the connection before the end
    ms: float | None = None  # the duration of the call in milliseconds

    def warn(self, warnings: Iterable[str]) -> None:
        """Add sentences that the answer, a header and the log show."""
        self.warnings += warnings

    def leave_out(self, left_out: LeftOut) -> None:
        """Record what the prompt is without."""
        self.left_out = {name: count for name, count in asdict(left_out).items() if count}

    @property
    def answer_fields(self) -> dict[str, Any]:
        """The fields `warnings` and `left_out` of the answer, if there is something to tell."""
        fields = {"warnings": self.warnings, "left_out": self.left_out}
        return {name: value for name, value in fields.items() if value}

    @property
    def header(self) -> list[tuple[bytes, bytes]]:
        """The warnings as a header: printable ASCII, at most 1,000 characters.

        Warnings name fields as the client wrote them, and a control character in a header would break the answer.
        """
        if not self.warnings:
            return []
        text = "; ".join(self.warnings).encode("ascii", "backslashreplace")
        text = re.sub(rb"[^ -~]", lambda found: b"\\x%02x" % found[0][0], text)
        return [(b"x-twostroke-warnings", text[:1000].strip())]

    @property
    def fields(self) -> dict[str, Any]:
        """The line of the log, without what is not known."""
        named = ("method", "path", "status", "key", "model", "client", "ms", "warnings", "left_out")
        return {name: value for name in named if (value := getattr(self, name))} | self._generated()

    def _generated(self) -> dict[str, Any]:
        """Tokens, time to the first token in milliseconds, and why the choices ended."""
        if not self.requests:
            return {}
        ttfts = [ttft for request in self.requests if (ttft := request.timings.ttft) is not None]
        reasons = dict.fromkeys(reason for request in self.requests for reason in finish_reasons(request))
        fields: dict[str, Any] = {
            "prompt_tokens": sum(request.prompt_tokens for request in self.requests),
            "cached_tokens": sum(request.cached_tokens for request in self.requests),
            "output_tokens": sum(map(output_tokens, self.requests)),
        }
        fields |= {"ttft_ms": round(min(ttfts) * 1e3, 3)} if ttfts else {}
        return fields | ({"finish_reason": ",".join(reasons)} if reasons else {})


def call_log(scope: MutableMapping[str, Any]) -> CallLog:
    """The record of a call, which the middleware has put into its ASGI scope."""
    return scope["call_log"]
