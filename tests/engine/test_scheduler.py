"""Scheduling: no request starves. Constraints: a failure ends only its own request."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.api.llm import LLM
from twostroke.engine.request import PRIORITY_S, Request
from twostroke.engine.scheduler import share_budget, share_whole
from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.errors import InvalidRequest
from twostroke.methods import method
from twostroke.sampling.params import SamplingParams

TinyLLM = Callable[..., LLM]


@given(todo=st.lists(st.integers(1, 50), max_size=12), budget=st.integers(1, 60))
def test_whole_or_not_at_all(todo: list[int], budget: int) -> None:
    counts = share_whole(todo, budget)
    assert all(count in (0, most) for count, most in zip(counts, todo, strict=True))
    assert counts[:1] == todo[:1]
    assert sum(counts) <= max([budget, *todo[:1]])
    left = budget - sum(counts)
    assert all(count or most > left for count, most in zip(counts, todo, strict=True))


@given(todo=st.lists(st.integers(1, 50), max_size=12), budget=st.integers(1, 60))
def test_share(todo: list[int], budget: int) -> None:
    """The whole budget is used if there is enough work; the oldest request gets half of it, or all that it needs."""
    counts = share_budget(todo, budget)
    assert all(0 <= count <= most for count, most in zip(counts, todo, strict=True))
    assert sum(counts) == min(budget, sum(todo))
    if todo:
        assert counts[0] >= min(todo[0], (budget + 1) // 2)
        # The shortest by more than the others can catch up in this step.
        shortest, *others = sorted(todo)
        if all(other > shortest + budget for other in others):
            assert counts[todo.index(shortest)] >= min(shortest, budget // 2)


@pytest.mark.parametrize(("mine", "theirs"), [(400, 8), (8, 400)], ids=["long among short", "short among long"])
def test_an_endless_stream_of_others_starves_nobody(mine: int, theirs: int, tiny_llm: TinyLLM) -> None:
    """A request ends after the number of steps that its share of the budget takes, however many others arrive."""
    llm = tiny_llm(max_step_tokens=20, prefix_index="off", max_running=64)
    params = SamplingParams(max_tokens=1)
    others = [llm.engine.submit(llm.request([9] * theirs, params)) for _ in range(3)]
    request = llm.engine.submit(llm.request([7] * mine, params))
    steps = 0
    while not request.done:
        others += [llm.engine.submit(llm.request([9] * theirs, params)) for _ in range(3)]
        llm.engine.step()
        steps += 1
    assert steps <= mine // 10 + (3 if mine < theirs else 5)
    for other in others:
        llm.engine.cancel(other)


def test_priorities_order_but_never_starve(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm(max_running=1)
    requests: dict[str, Request] = {}
    for name, priority, waited in (
        ("running", 0, 0.0),
        ("ordinary", 0, 0.0),
        ("later", 5, 0.0),
        ("sooner", -1, 0.0),
        ("patient", 5, 6 * PRIORITY_S),
    ):
        request = llm.request([5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True))
        request.priority = priority
        request.timings.arrival -= waited
        requests[name] = llm.engine.submit(request)
        if name == "running":
            llm.engine.step()
    ended: list[str] = []
    while len(ended) < len(requests):
        llm.engine.step()
        ended += [name for name, request in requests.items() if request.done and name not in ended]
    assert ended[0] == "running"
    assert set(ended[1:3]) == {"patient", "sooner"}
    assert ended[3:] == ["ordinary", "later"]


class Only:
    """A constraint that allows one id after another, and then none."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.place = ids, 0

    def mask(self) -> np.ndarray:
        mask = np.zeros(300, bool)  # fewer than the model's ids: the others are not allowed either
        mask[self.ids[self.place]] = True
        return mask

    def advance(self, token: int) -> None:
        if token != self.ids[self.place]:
            raise InvalidRequest("this token may not come")
        self.place += 1

    @property
    def finished(self) -> bool:
        return self.place == len(self.ids)


def ids(llm: LLM, prompts: list[list[int]], **options: Any) -> list[list[list[int]]]:
    made = llm.generate(prompts, **options)
    return [[[token.id for token in output.tokens] for output in completion.outputs] for completion in made]


@pytest.mark.parametrize(("name", "pages"), [("plain", 12), ("repeat", 12), ("best-of", 18)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constraints_under_every_schedule(name: str, pages: int, temperature: float, tiny_llm: TinyLLM) -> None:
    """Each choice has its own constraint, which restarts if the choice restarts; its end ends the choice."""
    wanted = [(7 * k) % 290 + 5 for k in range(30)]
    options: Any = {"constraint": lambda: Only(wanted), "temperature": temperature, "seed": 1, "n": 2}
    options |= {"max_tokens": 60, "min_tokens": 40, "logit_bias": {299: 100.0}, "method": method(name)}
    prompts = [[5] * 20, [6] * 40, [7] * 3]
    roomy, tight = tiny_llm(), tiny_llm(kv_bytes=pages * tiny_llm().pool.page_bytes, max_step_tokens=7)
    assert ids(roomy, prompts, **options) == [[wanted] * 2] * 3
    assert ids(tight, prompts, **options) == [[wanted] * 2] * 3
    assert tight.engine.preemptions > 0
    assert {o.finish_reason for o in roomy.generate([[5]], **options)[0].outputs} == {"stop"}


def test_what_fails_while_sampling_fails_alone(tiny_llm: TinyLLM) -> None:
    """A constraint or a condition that raises ends its request; others in the same batch continue."""
    llm = tiny_llm(prefix_index="off")

    class Broken(Only):
        def mask(self) -> np.ndarray:
            if self.place == 2:
                raise RuntimeError("broken")
            return super().mask()

    def program() -> Program:
        kv = yield Prefill([5, 6])
        yield Decode(kv, until=lambda sampled: len(sampled) == 3 and 1 // 0 > 0)

    expected = ids(llm, [[8, 9]], max_tokens=12, ignore_eos=True)[0][0]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    fine = llm.engine.submit(llm.request([8, 9], params))
    masked = llm.engine.submit(llm.request([8, 9], SamplingParams(constraint=lambda: Broken([3, 4, 5, 6]))))
    until = llm.engine.submit(Request(program, params, llm.tokenizer))
    while not (fine.done and masked.done and until.done):
        llm.engine.step()
    assert isinstance(masked.error, RuntimeError)
    assert isinstance(until.error, ZeroDivisionError)
    assert [token.id for token in fine.events] == expected
    assert fine.error is None
    assert llm.pool.num_used == 0


@pytest.mark.reference
def test_the_batch_is_counted(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm(max_step_tokens=8)
    llm.engine.submit(llm.request([5] * 12, SamplingParams(max_tokens=3, ignore_eos=True)))
    seen: list[tuple[int, int]] = []
    while llm.engine.step():
        seen.append((llm.engine.report.prefill, llm.engine.report.decode))
    assert seen == [(8, 0), (4, 0), (0, 1), (0, 1)]
