"""Decides how many tokens each lane enters in the next step.

There is one rule: every lane has known tokens that are not entered yet, and a step lets lanes catch up within a token
budget. Lanes that are one token behind (decoding) come first, with their guesses; the others share the rest of the
budget, whole or in chunks (chunked prefill, Agrawal et al. 2023, Sarathi). Chunking, prefix hits and replays after a
preemption are only lanes with more or fewer tokens to enter.

The budget is a number of tokens. With an ITL objective, while anything decodes, it shrinks to the largest budget whose
step is predicted to meet the objective: the cost of a token depends on the machine and on the context before it.

A small objective means small chunks: each reads all weights again, so prompts take longer. A large one means that
streams stand still. A step as long as `COMFORTABLE_STEPS` decode steps spends about a seventh of a chunk's time on
reading weights once more. Measured on two cores of a Xeon: with 100 ms, which is about ten steps of the 135M, four
streams beside a prompt of 4,000 tokens keep 96% of the throughput that they have without an objective, and their mean
ITL falls from 394 ms to 88. With 200 ms, about seven steps of the 0.5B, 16 clients keep 99%.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from twostroke.engine.lane import Lane
from twostroke.engine.options import LLMOptions
from twostroke.engine.request import Choice
from twostroke.fields import Checked, Rule, declare, like

# Tokens that prefills get under any objective: the kernels compute eight rows at little more than the cost of one.
MIN_CHUNK = 8
# An objective that is not given: so many decode steps, but no less than anybody reads a token in.
COMFORTABLE_STEPS, COMFORTABLE_MS = 8, 100

Plan = list[tuple[Choice, Lane, int]]  # lanes of choices, and how many of its tokens each enters


@dataclass(frozen=True)
class SchedulerConfig(Checked):
    """Limits of a step, checked on construction (InvalidRequest names the field)."""

    # token budget of a step, decode rows and prefill chunks together
    max_step_tokens: int = like(LLMOptions, "max_step_tokens")
    max_running: int = like(LLMOptions, "max_running")  # maximum number of choices that run at once
    # objective in milliseconds for the time of a step in which anything decodes; None for no objective
    itl_ms: float | None = like(LLMOptions, "itl_ms")
    # whether a step's tokens are read after the next step was launched (`engine/step_in_flight.py`); None if that gains
    # something on the backend
    in_flight: bool | None = declare(None, Rule(bool, optional=True))


def comfortable_itl_ms(decode_step_s: float) -> float:
    """The objective, in milliseconds to two digits, where a decode step of one stream takes `decode_step_s` seconds."""
    return float(f"{max(COMFORTABLE_MS, COMFORTABLE_STEPS * decode_step_s * 1e3):.2g}")


def plan(running: Iterable[Choice], config: SchedulerConfig, fits: Callable[[Plan], bool]) -> Plan:
    """Plan the next step: decoding lanes first, then by arrival.

    Args:
        running: choices in order of arrival.
        config: limits of the step.
        fits: whether a step would meet the ITL objective; called only if prefill would delay decoding lanes.
    """
    lanes = [(choice, lane) for choice in running for lane in choice.lanes if lane.todo and lane.missing is None]
    chosen = [(choice, lane, lane.num_next) for choice, lane in lanes if lane.decoding]
    # All decoding lanes go, even beyond the budget: leaving some out would stall streams to save a little time.
    # The oldest other lane enters at least one token: decoding never starves a prefill.
    budget = max(1, config.max_step_tokens - sum(count for _, _, count in chosen))
    behind = [(choice, lane) for choice, lane in lanes if not lane.decoding]
    todo = [len(lane.todo) for _, lane in behind]
    share = share_whole if any(lane.whole for _, lane in behind) else share_budget

    def with_chunks(budget: int) -> Plan:
        counts = share(todo, budget)
        return chosen + [(*one, count) for one, count in zip(behind, counts, strict=True) if count]

    if chosen and behind and config.itl_ms is not None:
        budget = largest_fitting(min(budget, sum(todo)), lambda tokens: fits(with_chunks(tokens)))
    return with_chunks(budget)


def largest_fitting(most: int, fits: Callable[[int], bool]) -> int:
    """The largest count up to `most` that fits, by bisection; never below min(MIN_CHUNK, most)."""
    low, high = min(MIN_CHUNK, most), most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def share_whole(todo: Sequence[int], budget: int) -> list[int]:
    """The same for lanes that enter all of their tokens or none: by arrival, and the oldest one always."""
    counts: list[int] = []
    for count in todo:
        fits = not counts or sum(counts) + count <= budget
        counts.append(count if fits else 0)
    return counts


def share_budget(todo: Sequence[int], budget: int) -> list[int]:
    """Number of tokens that each lane enters; lanes are in order of arrival.

    Half of the budget goes by arrival, so the oldest lane always progresses: short prompts cannot starve a long one.
    The other half goes to the lanes with the fewest tokens left, so a long prompt does not block the short ones.
    """
    counts = [0] * len(todo)

    def spend(order: Iterable[int], tokens: int) -> int:
        for i in order:
            more = min(tokens, todo[i] - counts[i])
            counts[i], tokens = counts[i] + more, tokens - more
        return tokens

    left = budget // 2 + spend(range(len(todo)), budget - budget // 2)
    spend(sorted(range(len(todo)), key=lambda i: todo[i] - counts[i]), left)
    return counts
