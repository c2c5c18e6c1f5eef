"""How a request has ended, in the words of metrics, logs and spans."""

from collections.abc import Sequence

from twostroke.engine.request import Request

OUTCOMES = ("done", "aborted", "error")
FINISH_REASONS = ("stop", "length", "abort", "error")


def outcome(request: Request, error: Exception | None) -> str:
    """One of `OUTCOMES`."""
    return "error" if error is not None else "aborted" if request.cancelled else "done"


def finish_reasons(request: Request, error: Exception | None = None) -> Sequence[str]:
    """Why each choice ended, as one of `FINISH_REASONS`. A choice that is cut off, or will be, has "abort"."""
    if error is not None or request.error is not None:
        return ["error"] * len(request.choices)
    if request.cancelled or not request.done:
        return ["abort"] * len(request.choices)
    return [choice.output.finish_reason or "stop" for choice in request.choices]


def output_tokens(request: Request) -> int:
    """Tokens generated so far, of all choices."""
    return sum(len(choice.output.ids) for choice in request.choices)
