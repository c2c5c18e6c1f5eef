"""How the engine's process of `twostroke serve` opens its model. It runs there, and reports to the same terminal."""

from twostroke.api.llm import LLM
from twostroke.cli.options import ModelOptions
from twostroke.cli.serve_options import StepOptions


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
