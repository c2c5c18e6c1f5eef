"""How the engine's process of `twostroke serve` opens its model. It runs there, and reports to the same terminal."""

from collections.abc import Sequence

from twostroke.api.llm import LLM
from twostroke.cli.options import ModelOptions
from twostroke.cli.serve_options import StepOptions
from twostroke.server.engine_process.messages import OpenOptions


def open_served(options: ModelOptions, steps: StepOptions, spare_bytes: int, kv_bytes: int | None) -> LLM:
    """Open it. `kv_bytes` are the options' own, or those of an earlier process of the same server."""
    llm = options.open(
        announced=True,
        max_running=steps.max_running,
        itl_ms=steps.objective,
        spare_bytes=spare_bytes,
        kv_bytes=kv_bytes,
    )
    if steps.itl_ms == "auto":
        llm.engine.choose_itl()
    return llm


def opening_of(
    options: ModelOptions, steps: StepOptions, server_bytes: int, method_modules: Sequence[str], log_format: str
) -> OpenOptions:
    """What tells a process to open a model; `server_bytes` are to stay free for the server beside it."""
    spare = options.spare_bytes + server_bytes
    arguments = {"options": options, "steps": steps, "spare_bytes": spare, "kv_bytes": options.kv_bytes}
    return OpenOptions(open_served, arguments, 0, method_modules, log_format, options.draft is None)
