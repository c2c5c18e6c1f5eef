"""An engine on this machine: its steps are timed for seconds before they are simulated."""

from collections.abc import Callable

from twostroke.api.llm import LLM
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.study.roofline.model_spec import ModelSpec, kv_format_of
from twostroke.study.simulate.engine_setup import EngineSetup, HttpOverhead
from twostroke.study.simulate.model_timing import LatencyModel, time_model
from twostroke.study.simulate.step_costs import MeasuredCosts

SECONDS = 20.0  # that timing takes


def measured_setup(
    # name, weights, kv_bytes, page_size, index: as for `LLM`
    name: str,
    weights: str | None = None,
    kv_bits: int = 16,  # of a number in the KV cache, 16, 8 or 6
    kv_bytes: int | None = None,
    page_size: int = 16,
    index: str = "radix",
    scheduler: SchedulerConfig | None = None,  # limits of a step
    progress: Callable[[str], None] = lambda _: None,  # called with what is done now
) -> EngineSetup:
    """Open a model, time it, and close it again."""
    limits, stored = scheduler or SchedulerConfig(), kv_format_of(kv_bits)
    with LLM(
        name,
        weights=weights or "stored",
        kv_dtype=stored.name if kv_bits < 16 else "auto",
        kv_bytes=kv_bytes,
        page_size=page_size,
        prefix_index=index,
        max_step_tokens=limits.max_step_tokens,
    ) as llm:
        return setup_of(llm, time_model(llm, SECONDS, progress), index, limits, kv_bits, weights or "stored")


def setup_of(
    llm: LLM, timed: LatencyModel, index: str, scheduler: SchedulerConfig, kv_bits: int = 16, weights: str = "stored"
) -> EngineSetup:
    """The setup of an opened model that was timed."""
    return EngineSetup(
        model=ModelSpec(llm.name, llm.config, weights=weights).with_kv_bits(kv_bits),
        costs=MeasuredCosts(timed.predictor, timed.step_s, timed.token_s, timed.entered_s),
        pages=llm.pool.num_pages,
        page_size=llm.pool.page_size,
        index=index,
        asynchronous=llm.backend.asynchronous,
        scheduler=scheduler,
        http=HttpOverhead(timed.request_s),
    )
