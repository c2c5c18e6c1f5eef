"""Who enters how many tokens in the next step.

One rule: every lane has tokens it knows and has not entered, and a step lets lanes catch up within a token
budget. Lanes that are one token behind (decoding) come first, one token each; what is left of the budget is shared
by the others, whole or in chunks (chunked prefill, Agrawal et al. 2023, Sarathi). Chunking, prefix hits and replays
after a preemption are all just lanes with more or fewer tokens to go.

The budget is a number of tokens. With an ITL objective it shrinks, while anything decodes, to the most with which the
step is predicted to stay inside the objective: what a token costs depends on the machine and on the context behind it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from twostroke.engine.lane import Lane
from twostroke.engine.request import Choice
from twostroke.fields import Checked, integer, number

# What prefills get however tight the objective: the kernels take eight rows at once at little more than one's price.
LEAST_CHUNK = 8

Plan = list[tuple[Lane, int]]  # a lane, and how many of its tokens to enter


@dataclass(frozen=True)
class SchedulerConfig(Checked):
    """Limits of a step, checked on construction (InvalidRequest names the field).

    Attributes:
        max_step_tokens: token budget of a step, decode rows and prefill chunks together.
        max_running: most choices that run at once.
        itl_ms: objective for the time of a step in which anything decodes, in milliseconds; None for none.
    """

    max_step_tokens: int = integer(512, least=1)
    max_running: int = integer(256, least=1)
    itl_ms: float | None = number(None, above=0)


def plan(running: Iterable[Choice], config: SchedulerConfig, fits: Callable[[Plan], bool]) -> Plan:
    """What the next step enters: decoding lanes first, then by arrival.

    Args:
        running: in order of arrival.
        config: its limits.
        fits: whether a step would keep the ITL objective; asked only where it would hold up what decodes.
    """
    lanes = [lane for choice in running for lane in choice.lanes if lane.todo]
    chosen = [(lane, 1) for lane in lanes if lane.decoding]
    # More decoding lanes than budget: they all go. Leaving some out would stall streams to save a little time.
    # And the oldest of the others gets on by a token at least: decoding never starves a prefill.
    budget = max(1, config.max_step_tokens - len(chosen))
    behind = [lane for lane in lanes if not lane.decoding]
    todo = [len(lane.todo) for lane in behind]

    def with_chunks(budget: int) -> Plan:
        counts = share(todo, budget)
        return chosen + [(lane, count) for lane, count in zip(behind, counts, strict=True) if count]

    if chosen and behind and config.itl_ms is not None:
        budget = largest(min(budget, sum(todo)), lambda tokens: fits(with_chunks(tokens)))
    return with_chunks(budget)


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The most tokens up to `most` that fit, where fewer fit too; `LEAST_CHUNK`, or `most`, whether they fit or not."""
    low, high = min(LEAST_CHUNK, most), most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def share(todo: Sequence[int], budget: int) -> list[int]:
    """How many of its tokens each lane enters, given in order of arrival.

    Half of the budget goes by arrival, so the oldest always gets on: no stream of short prompts starves a long one.
    The other half goes to whoever has least to go, so no long prompt keeps all short ones behind it waiting.
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
