"""A program may wait for other threads: no step waits for them, and the choice does not count as running."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from twostroke.api.llm import LLM
from twostroke.engine.engine_thread import EngineThread, Update
from twostroke.engine.request import Request
from twostroke.engine.strokes import Await, Decode, Prefill, Program
from twostroke.errors import OutOfPages
from twostroke.sampling.params import SamplingParams

PROMPT = list(range(5, 45))
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture
def llm(tiny_llm: Callable[..., LLM]) -> LLM:
    return tiny_llm(prefix_index="off")


def request(llm: LLM, futures: list[Future[Any]], seen: list[Any]) -> Request:
    """Waits for each future, then prefills and decodes."""

    def program() -> Program:
        for future in futures:
            try:
                seen.append((yield Await(lambda future=future: future)))
            except ValueError as error:
                seen.append(error)
        yield Decode((yield Prefill(PROMPT)))

    return Request(program, PARAMS, llm.tokenizer)


def ids(one: Request) -> list[int]:
    return [token.id for token in one.events]


def test_others_go_on_meanwhile(llm: LLM) -> None:
    expected = llm.generate([PROMPT], PARAMS)[0].outputs[0].tokens
    future, seen = Future[Any](), list[Any]()
    waits, other = request(llm, [future], seen), llm.request(PROMPT, PARAMS)
    for one in (waits, other):
        llm.engine.submit(one)
    while not other.done:
        llm.engine.step()
    assert (llm.engine.num_running, llm.engine.num_arriving, seen) == (0, 1, [])
    assert llm.engine.step() is False
    timer = threading.Timer(0.05, future.set_result, ["come"])
    timer.start()
    llm.engine.finish([waits])
    timer.join()
    assert seen == ["come"]
    assert ids(waits) == ids(other) == [token.id for token in expected]


def test_an_error_is_raised_in_the_program(llm: LLM) -> None:
    wrong, right, seen = Future[Any](), Future[Any](), list[Any]()
    wrong.set_exception(ValueError("no"))
    right.set_result(1)
    llm.engine.run([one := request(llm, [wrong, right], seen)])
    assert (str(seen[0]), seen[1], len(ids(one))) == ("no", 1, 6)
    assert llm.pool.num_used == 0  # though the error, which is kept, has frames that it came through


def test_an_error_that_no_program_catches(llm: LLM) -> None:
    unknown = Future[Any]()
    unknown.set_exception(KeyError("not caught"))
    with pytest.raises(KeyError):
        llm.engine.run([request(llm, [unknown], [])])


def test_side_by_side_with_a_stroke(llm: LLM) -> None:
    future = Future[Any]()
    results: list[Any] = []

    def program() -> Program:
        results.extend((yield [Await(lambda: future), Prefill(PROMPT)]))

    one = llm.engine.submit(Request(program, PARAMS, llm.tokenizer))
    for _ in range(5):
        llm.engine.step()
    assert (one.done, llm.engine.num_arriving) == (False, 1)
    future.set_result("come")
    llm.engine.finish([one])
    assert (results[0], results[1].tokens) == ("come", PROMPT)
    results.clear()


def test_no_stroke_at_all(llm: LLM) -> None:
    """A list that a program makes may be empty: it goes on at once."""
    seen: list[Any] = []

    def program() -> Program:
        seen.append((yield []))
        seen.append((yield Prefill(PROMPT)).tokens)

    llm.engine.run([Request(program, PARAMS, llm.tokenizer)])
    assert seen == [[], PROMPT]


@pytest.mark.parametrize("end", ["cancel", "preempt"])
def test_nobody_waits_for_what_nobody_wants(llm: LLM, end: str) -> None:
    first, second, seen = Future[Any](), Future[Any](), list[Any]()
    left = [first, second]

    def program() -> Program:
        seen.append((yield Await(lambda: left.pop(0))))

    one = llm.engine.submit(Request(program, PARAMS, llm.tokenizer))
    llm.engine.step()
    if end == "cancel":
        llm.engine.cancel(one)
        assert (first.cancelled(), llm.engine.num_arriving, seen) == (True, 0, [])
        return
    (choice,) = one.choices
    llm.engine.placement.preempt(choice)
    assert first.cancelled()
    llm.engine.step()
    second.set_result("again")
    llm.engine.finish([one])
    assert seen == ["again"]


def test_who_finds_no_room_elsewhere_waits_for_it_here(llm: LLM) -> None:
    """As a program that runs out of pages: it starts again once others have ended."""
    tries: list[Future[Any]] = []

    def start() -> Future[Any]:
        tries.append(Future())
        if len(tries) < 3:
            tries[-1].set_exception(OutOfPages("no room", 4))
        else:
            tries[-1].set_result("room")
        return tries[-1]

    seen: list[Any] = []

    def program() -> Program:
        seen.append((yield Await(start)))

    other, one = llm.request(PROMPT, PARAMS), Request(program, PARAMS, llm.tokenizer)
    for each in (other, one):
        llm.engine.submit(each)
    llm.engine.finish([one, other])
    assert (seen, len(tries), len(ids(other))) == (["room"], 3, 6)


def test_the_engines_thread_wakes(llm: LLM) -> None:
    done, future = threading.Event(), Future[Any]()
    seen: list[Any] = []

    def publish(updates: list[Update]) -> None:
        if any(update.done for update in updates):
            done.set()

    thread = EngineThread(llm.engine)
    thread.start(publish)
    thread.submit(request(llm, [future], seen), None)
    threading.Timer(0.05, future.set_result, [1]).start()
    assert done.wait(PATIENCE_S)
    thread.stop()
    assert seen == [1]
