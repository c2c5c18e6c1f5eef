"""The circuit breaker, with a clock of ours."""

# pyright: reportPrivateUsage=false

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.kv.tiers.remote.circuit_breaker import IN_A_ROW, MAX_OPEN_S, MIN_OPEN_S, CircuitBreaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock, draw: float = 1.0) -> CircuitBreaker:
    """A circuit that has just been opened by failures."""
    circuit = CircuitBreaker(clock, lambda: draw)
    for _ in range(IN_A_ROW):
        fail(circuit)
    assert not circuit.closed
    return circuit


def ask(circuit: CircuitBreaker) -> int:
    ticket = circuit.acquire()
    assert ticket is not None
    return ticket


def fail(circuit: CircuitBreaker, at_once: bool = False) -> float | None:
    return circuit.failed(ask(circuit), at_once)


def succeed(circuit: CircuitBreaker) -> bool:
    return circuit.succeeded(ask(circuit))


@pytest.mark.parametrize(
    ("calls", "is_open"),
    [
        ("x" * 5, True),
        ("x" * 4, False),
        ("xxxx." * 2, False),  # 8 of 10
        ("xxxx." * 2 + "xx", True),  # ten failures, as half of the last 20
        ("xx.." * 5, True),
        ("x.." * 20, False),  # a third
        ("." * 30 + "xxxxx", True),
        ("x.x" * 4 + "." * 20 + "xxxx", False),  # what is long ago counts no more
    ],
)
def test_what_opens_it(calls: str, is_open: bool) -> None:
    circuit = CircuitBreaker(Clock())
    for call in calls:
        if call == "x":
            fail(circuit)
        else:
            succeed(circuit)
        if not circuit.closed:
            break
    assert circuit.closed is not is_open


def test_a_full_server_opens_it_at_once() -> None:
    assert fail(CircuitBreaker(Clock(), lambda: 1.0), at_once=True) == MIN_OPEN_S


def test_it_opens_for_longer_each_time_and_not_beyond_a_limit() -> None:
    clock = Clock()
    circuit, waits = opened(clock), list[float]()
    wait = MIN_OPEN_S
    for _ in range(7):
        waits.append(wait)
        clock.now += wait - 1e-6
        assert circuit.acquire() is None
        clock.now += 1e-6
        found = fail(circuit)
        assert found is not None
        wait = found
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    assert waits[-1] == MAX_OPEN_S


def test_waits_are_not_the_same_for_all_clients() -> None:
    clock = Clock()
    circuit = opened(clock, draw=0.0)
    clock.now += MIN_OPEN_S / 2
    ask(circuit)


def test_one_probe_closes_it() -> None:
    clock = Clock()
    circuit = opened(clock)
    clock.now += MIN_OPEN_S
    probe = ask(circuit)
    assert circuit.acquire() is None, "one at a time"
    assert circuit.succeeded(probe)
    assert circuit.closed
    assert fail(circuit) is None, "one failure does not open it again"
    for _ in range(3):
        fail(circuit)
    assert fail(circuit) == MIN_OPEN_S, "and the waits begin anew"


def test_a_probe_that_tells_nothing_lets_another_go() -> None:
    clock = Clock()
    circuit = opened(clock)
    clock.now += MIN_OPEN_S
    probe = ask(circuit)
    circuit.abandon(probe)
    assert not circuit.closed
    assert succeed(circuit)


def test_calls_that_began_before_have_no_say() -> None:
    clock = Clock()
    circuit = CircuitBreaker(clock, lambda: 1.0)
    old = [ask(circuit) for _ in range(8)]
    for ticket in old[:IN_A_ROW]:
        circuit.failed(ticket)
    assert circuit.failed(old[5]) is None, "it does not stay open for longer"
    assert not circuit.succeeded(old[6]), "nor is it closed"
    clock.now += MIN_OPEN_S
    probe = ask(circuit)
    circuit.abandon(old[7])
    assert circuit.acquire() is None, "nor may a second probe go"
    assert circuit.succeeded(probe)


@given(st.lists(st.one_of(st.sampled_from(["ask", "good", "bad", "full", "none"]), st.floats(0, 40)), max_size=80))
def test_at_most_one_call_goes_while_it_is_open_and_it_can_always_close(steps: list[str | float]) -> None:
    clock = Clock()
    circuit = CircuitBreaker(clock)
    out: list[tuple[int, bool]] = []  # calls under way: ticket, and whether it was closed when they went
    for step in steps:
        if isinstance(step, float):
            clock.now += step
        elif step == "ask":
            closed, ticket = circuit.closed, circuit.acquire()
            assert ticket is not None or not closed
            if ticket is not None:
                out.append((ticket, closed))
        elif out:
            ticket, _ = out.pop(len(out) // 2)
            if step == "good":
                circuit.succeeded(ticket)
            elif step == "none":
                circuit.abandon(ticket)
            else:
                circuit.failed(ticket, at_once=step == "full")
        if not circuit.closed:
            assert len({ticket for ticket, closed in out if not closed and ticket == circuit._era}) <= 1
    for ticket, _ in out:  # whatever happened, once all calls are over it closes by itself
        circuit.failed(ticket)
    clock.now += MAX_OPEN_S
    if not circuit.closed:
        assert succeed(circuit)
    assert circuit.closed
