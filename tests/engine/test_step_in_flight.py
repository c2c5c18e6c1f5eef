"""One step in flight: the same bits as when tokens are read at once, no page lost, no token waited for too early."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.late import LATE_S, late
from tests.tiny import VOCAB, write_model
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.engine import step_in_flight
from twostroke.engine.request import Request
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.engine.step import ScheduledStep
from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.errors import NotFinite
from twostroke.sampling.draw import Sampled
from twostroke.sampling.params import SamplingParams
from twostroke.sampling.statistics import NO_TOKEN

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")

PAGE_BYTES = 3 * 2 * 2 * 64 * 2 * 16
FLYING = SchedulerConfig(in_flight=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("flight"), head_dim=64, num_attention_heads=2)


def prompt(length: int) -> list[int]:
    return [(i * i * 7 + 5) % (VOCAB - 2) + 2 for i in range(length)]


@pytest.fixture
def opened(directory: Path) -> Iterator[Callable[..., LLM]]:
    """Opens a model that keeps a step in flight. At the end no page may be lost."""
    models: list[LLM] = []

    def open_model(**options: Any) -> LLM:
        chosen: dict[str, Any] = {"backend": "native", "weights": "int8", "prefix_index": "off", "kv_bytes": 16 << 20}
        models.append(LLM(str(directory), threads=1, **(chosen | options)))
        models[-1].engine.config = FLYING
        return models[-1]

    yield open_model
    for llm in models:
        assert llm.pool.num_used == llm.engine.cached_pages(llm.pool)
        assert llm.engine.flight.step is None


def test_a_step_is_launched_before_tokens_are_read(opened: Callable[..., LLM]) -> None:
    """And it is sampled after that. What is known to be the last token is never entered."""
    llm = opened()
    device = late(llm)
    request = llm.engine.submit(llm.request(prompt(5), SamplingParams(max_tokens=4, ignore_eos=True)))
    llm.engine.finish([request])
    assert device.log == [
        *[("forward", 5, 0), ("sample", 1, 1)],
        *[("forward", 1, 1), ("read", 1, 1), ("sample", 1, 2)],
        *[("forward", 1, 1), ("read", 1, 2), ("sample", 1, 3)],
        *[("forward", 1, 1), ("read", 1, 3), ("sample", 1, 4)],
        ("read", 1, 4),
    ]
    device.close()


def test_chunks_without_tokens_are_waited_for(opened: Callable[..., LLM]) -> None:
    """So never more than one step is ahead, also while a long prompt is entered."""
    llm = opened()
    llm.engine.config = SchedulerConfig(max_step_tokens=8, in_flight=True)
    device = late(llm)
    llm.prefill(prompt(24))
    assert [what for what, _, _ in device.log] == ["forward", "sample", "forward", "read", "sample", "forward", "read"]
    device.close()


def test_nothing_overlaps_by_itself_on_a_cpu(opened: Callable[..., LLM]) -> None:
    llm = opened()
    llm.engine.config = SchedulerConfig()
    device = late(llm)
    llm.generate([prompt(5)], max_tokens=4, ignore_eos=True)
    assert sum(placeholders for what, _, placeholders in device.log if what == "forward") == 0
    device.close()


def test_a_row_too_many_leaves_nothing(opened: Callable[..., LLM]) -> None:
    """The page that it took is given back, and its slot is used again."""
    llm = opened()
    made = [token.id for token in llm.decode(llm.prefill(prompt(13)), max_tokens=30, ignore_eos=True)]
    for count in range(1, 12):
        last = made[count - 1]
        if last in made[: count - 1]:
            continue
        kv = llm.prefill(prompt(13))
        decoding = llm.decode(kv, stop_token_ids=[last], ignore_eos=True)
        assert [token.id for token in decoding] == made[:count]
        assert decoding.kv.tokens == prompt(13) + made[: count - 1]
        assert llm.pool.num_used == decoding.kv.num_pages == -(-(13 + count - 1) // 16)
        rest = [token.id for token in llm.decode(decoding.kv, max_tokens=30 - count, ignore_eos=True)]
        assert rest == made[count:]
        del kv, decoding


@pytest.mark.parametrize("pages", [2, 3])
def test_the_pool_fills_up(pages: int, opened: Callable[..., LLM]) -> None:
    """The last token has no entry; the answer ends with "length"."""
    whole = opened().generate([prompt(10)], max_tokens=60, ignore_eos=True)[0]
    llm = opened(kv_bytes=pages * PAGE_BYTES)
    (completion,) = llm.generate([prompt(10)], max_tokens=None, ignore_eos=True)
    assert completion.finish_reason == "length"
    assert len(completion.tokens) == pages * 16 - 10
    assert [token.id for token in completion.tokens] == [token.id for token in whole.tokens][: pages * 16 - 10]


def test_an_ending_token_at_the_last_slot(opened: Callable[..., LLM]) -> None:
    """It needs no page: the answer ends with "stop", and not with "length"."""
    made = [token.id for token in opened().generate([prompt(10)], max_tokens=60, ignore_eos=True)[0].tokens]
    llm = opened(kv_bytes=2 * PAGE_BYTES)
    tried = 0
    for count in (6, 7, 8, 21, 22):  # slots 15, 16, 17, 30, 31 are those of the token before
        if made[count - 1] not in made[: count - 1]:
            (completion,) = llm.generate([prompt(10)], stop_token_ids=[made[count - 1]], ignore_eos=True)
            assert (len(completion.tokens), completion.finish_reason) == (count, "stop")
            tried += 1
    assert tried > 2


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_row_too_many_is_nobody_elses_end(in_flight: bool, opened: Callable[..., LLM]) -> None:
    """It takes a page in the step in which a stroke beside it needs the last one."""
    llm = opened(kv_bytes=6 * PAGE_BYTES)
    llm.engine.config = SchedulerConfig(max_step_tokens=17, in_flight=in_flight)

    def program() -> Program:
        kv = yield Prefill(prompt(12))
        run, other = yield [Decode(kv, until=lambda sampled: len(sampled) == 5), Prefill([7] * 80)]
        return len(run.kv), len(other)

    request = Request(program, SamplingParams(max_tokens=50, ignore_eos=True), llm.tokenizer)
    llm.engine.finish([llm.engine.submit(request)])
    assert request.result == (16, 80)
    assert request.preemptions == 0


def test_the_context_fills_up(opened: Callable[..., LLM]) -> None:
    (completion,) = opened().generate([[5] * 2040], max_tokens=None, ignore_eos=True)
    assert len(completion.tokens) == 8
    assert completion.finish_reason == "length"


def test_steps_have_work_until_the_last_token_is_read(opened: Callable[..., LLM]) -> None:
    llm = opened()
    request = llm.engine.submit(llm.request(prompt(5), SamplingParams(max_tokens=3, ignore_eos=True)))
    found = []
    while llm.engine.step():
        found.append(len(request.events))
    assert found == [0, 1, 2, 3]
    assert request.done


def test_cancelled_and_closed_with_a_step_in_flight(opened: Callable[..., LLM]) -> None:
    llm = opened()
    device = late(llm)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    expected = [token.id for token in llm.generate([prompt(9)], params)[0].tokens]
    for steps in range(1, 6):
        gone, stays = (llm.engine.submit(llm.request(prompt(9), params)) for _ in range(2))
        for _ in range(steps):
            llm.engine.step()
        llm.engine.cancel(gone)
        assert llm.pool.num_used == 1
        llm.engine.finish([stays])
        assert [token.id for token in stays.events] == expected
    last = llm.engine.submit(llm.request(prompt(9), params))
    for _ in range(3):
        llm.engine.step()
    llm.engine.close()
    assert last.done
    device.close()


def test_an_interrupted_step_ends_what_is_in_flight(opened: Callable[..., LLM]) -> None:
    llm = opened()
    request = llm.engine.submit(llm.request(prompt(9), SamplingParams(max_tokens=50, ignore_eos=True)))
    for _ in range(3):
        llm.engine.step()

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request.choices[0], "deliver", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.engine.step()
    assert request.done
    assert llm.pool.num_used == 0
    assert len(llm.generate([prompt(9)], max_tokens=5, ignore_eos=True)[0].tokens) == 5


def test_a_failing_condition_ends_alone(opened: Callable[..., LLM]) -> None:
    class Broken:
        finished = False

        def __init__(self) -> None:
            self.count = 0

        def mask(self) -> np.ndarray:
            return np.ones(VOCAB, bool)

        def advance(self, token: int) -> None:
            self.count += 1
            if self.count == 3:
                raise RuntimeError("a mistake in a grammar")

    llm = opened()
    good = llm.engine.submit(llm.request(prompt(9), SamplingParams(max_tokens=9, ignore_eos=True)))
    bad = llm.engine.submit(llm.request(prompt(9), SamplingParams(max_tokens=9, constraint=Broken)))
    with pytest.raises(RuntimeError, match="a mistake"):
        llm.engine.finish([bad])
    llm.engine.finish([good])
    assert (len(bad.events), len(good.events)) == (2, 9)


def test_a_model_that_computes_nan(opened: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """The request whose token is none fails when it is read, after its row too many; others go on."""
    llm = opened()
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    expected = [token.id for token in llm.generate([prompt(9)], params)[0].tokens]
    compiled, asked = llm.model.compiled, 0
    sample = compiled.sample

    def sometimes(rows: Any, draws: Any) -> Any:
        nonlocal asked
        asked += 1
        drawn = sample(rows, draws)
        if asked == 3:
            drawn[0] = Sampled(NO_TOKEN)  # pyright: ignore[reportIndexIssue]
        return drawn

    monkeypatch.setattr(compiled, "sample", sometimes)
    bad, good = (llm.engine.submit(llm.request(prompt(9), params)) for _ in range(2))
    with pytest.raises(NotFinite):
        llm.engine.finish([bad])
    assert llm.pool.wipes
    llm.engine.finish([good])
    assert len(bad.events) == 2
    assert [token.id for token in good.events] == expected


def test_a_step_is_timed_to_its_end(opened: Callable[..., LLM]) -> None:
    """From the end of the step before; not if the caller pauses meanwhile."""
    now = 0.0
    engine = opened().engine
    one = step_in_flight.StepInFlight(engine.placement, lambda: now)
    found: list[float | None] = []
    for began, left, entered, over in [
        (10, 11, 11.1, 15),
        (11.1, 15.2, 15.3, 19),
        (15.3, 19.1, 30, 30.1),
        (30, 31, 31, 36),
    ]:
        now = left
        one.launch_sampling(ScheduledStep([], 1.0, began), [], engine.requests.guarded)
        now = over
        found.append(one.collect_tokens(engine.requests.guarded, entered))
    assert found == [5, 4, None, pytest.approx(5.9)]


def test_a_forecast_follows_steps_in_flight(opened: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = opened(itl_ms=50.0)
    llm.engine.config = SchedulerConfig(itl_ms=50.0, in_flight=True)
    device, forecast = late(llm), llm.engine.forecast
    assert forecast is not None
    seen: list[float] = []
    monkeypatch.setattr(forecast, "observe", lambda _chunks, _predicted, measured: seen.append(measured))
    monkeypatch.setattr(step_in_flight, "PAUSE", 1.0)
    began = time.perf_counter()
    llm.generate([prompt(5)], max_tokens=20, ignore_eos=True)
    assert len(seen) == 20
    assert all(one > LATE_S for one in seen)
    assert sum(seen) <= time.perf_counter() - began
    device.close()
