"""What a server's HTTP adds to its engine, measured by a few requests of other lengths than those that are predicted.

HTTP takes time of its own, on the way of a request to the engine and of tokens to their users. And it works on the
cores that the kernels need: steps get longer with each stream, some stall, and tokens of a stream come late and then
several at once. Streams that have the server for themselves, alone and eight at once, tell what happens to steps and
tokens. Requests that come to a server at rest tell what happens before the first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, median
from typing import Any

import numpy as np

from twostroke.models.cost import SequenceRows
from twostroke.models.step_predictor import nonnegative_least_squares
from twostroke.study.simulate.engine_setup import EngineSetup, HttpOverhead
from twostroke.study.simulate.step_costs import HostInclusiveSeconds, MeasuredCosts, StepCostModel

SHORT, LONG, ANSWER, STREAMS = 48, 448, 48, 8
WINDOW = 8  # gaps whose mean is a pace: tokens come late and then several at once
STALL = 2.0  # times the usual pace from which on a step counts as stalled
LEAST = 0.8  # part of the usual pace that a step takes at least: what comes sooner after a token, that token was late

AT_REST, PART = 2.0, 0.5  # requests a second to a server at rest, and their part of what it could serve, at most
_LENGTHS = ["--input-tokens", str(SHORT), "--output-tokens", str(ANSWER)]


def probes(costs: StepCostModel) -> dict[str, list[str]]:
    """The options of `bench serve` that send each kind of requests to a server whose steps take so long."""
    alone, tokens = HostInclusiveSeconds(costs), 4
    busy_s = alone.seconds([SequenceRows(SHORT + LONG, 0, 1)]) + tokens * alone.seconds(
        [SequenceRows(1, SHORT + LONG, 1)]
    )
    rate = min(AT_REST, PART / busy_s)
    rest = ["--rate", f"{rate:.3g}", "--burstiness", "100", "--requests", "14", "--output-tokens", str(tokens)]
    return {
        "one stream": ["--concurrency", "1", "--requests", "12", *_LENGTHS],
        "streams": ["--concurrency", str(STREAMS), "--requests", str(3 * STREAMS), *_LENGTHS],
        "short": [*rest, "--input-tokens", str(SHORT)],
        "long": [*rest, "--input-tokens", str(LONG)],
        "known": [*rest, "--input-tokens", str(SHORT), "--prefix-tokens", str(LONG)],
    }


@dataclass(frozen=True)
class Stream:
    """One answer as its client got it: tokens of its prompt, how many of them were cached, and times in seconds."""

    prompt: int
    cached: int
    due: float
    tokens: Sequence[float]

    @classmethod
    def of(cls, line: dict[str, Any]) -> Stream:
        """From a line that `bench serve --output` keeps."""
        return cls(line["input_tokens"], line["cached_tokens"] or 0, line["due_s"], line["tokens_s"])


@dataclass(frozen=True)
class Pace:
    """How the tokens of streams came.

    Attributes:
        step_s: the usual step.
        stalls: [steps] what each step took besides.
        late_s: [tokens] by how much each came late.
    """

    step_s: float
    stalls: list[float]
    late_s: list[float]

    @classmethod
    def of(cls, streams: Sequence[Stream]) -> Pace:
        """A token was made no later than any token after it allows, with the least step between any two of them."""
        times = [np.array(one.tokens) for one in streams]
        pace = float(np.median(np.concatenate([one[WINDOW:] - one[:-WINDOW] for one in times]))) / WINDOW
        stalls, late = list[float](), list[float]()
        for one in times:
            even = LEAST * pace * np.arange(len(one))
            came = one - even
            made = np.minimum.accumulate(came[::-1])[::-1]
            late += (came - made).tolist()
            steps = np.diff(made + even)
            stalls += np.where(steps > STALL * pace, steps - pace, 0.0).tolist()
        return cls(pace, stalls, late)


@dataclass(frozen=True)
class Added:
    """What HTTP adds: to a step, to each token that it makes, to a request, to each token of its prompt, and to each of
    these that the prefix index did not have. In seconds."""

    step_s: float
    token_s: float
    request_s: float
    prompt_s: float
    entered_s: float


def with_http(setup: EngineSetup, probed: dict[str, list[Stream]]) -> tuple[EngineSetup, dict[str, float]]:
    """The setup with what HTTP adds, and its figures.

    Args:
        setup: an engine whose steps were timed.
        probed: what came of each of the `probes`.
    """
    costs = setup.costs
    assert isinstance(costs, MeasuredCosts)
    one, several = Pace.of(probed["one stream"]), Pace.of(probed["streams"])
    row = SequenceRows(1, SHORT + ANSWER // 2, 1)
    alone_s = one.step_s - HostInclusiveSeconds(costs).seconds([row])  # step_s + token_s
    token_s = max(0.0, several.step_s - HostInclusiveSeconds(costs).seconds([row] * STREAMS) - alone_s) / (STREAMS - 1)
    step_s = max(0.0, alone_s - token_s)
    late = [*one.late_s, *several.late_s]
    slowed = replace(
        costs,
        host_s=costs.host_s + step_s,
        token_s=costs.token_s + token_s,
        stalls=(*one.stalls, *several.stalls),
    )
    amounts, rest = list[list[float]](), list[float]()
    for name in ("short", "long", "known"):
        streams = [one for one in probed[name] if (one.cached > 0) == (name == "known")]
        ttft = median(one.tokens[0] - one.due for one in streams)
        prompt, entered = streams[-1].prompt, streams[-1].prompt - streams[-1].cached
        amounts.append([1 / ttft, prompt / ttft, entered / ttft])
        prefill_s = HostInclusiveSeconds(slowed).seconds([SequenceRows(entered, prompt - entered, 1)])
        rest.append(1 - (prefill_s + median(late)) / ttft)
    columns = np.array(amounts)
    scale = columns.max(0)
    found = nonnegative_least_squares(columns / scale, np.maximum(0.0, rest)) / scale
    added = Added(step_s, token_s, *found.tolist())
    front = HttpOverhead(setup.http.request_s + added.request_s, added.prompt_s, tuple(late))
    made = replace(setup, costs=replace(slowed, entered_s=slowed.entered_s + added.entered_s), http=front)
    figures = {"stall_mean_s": mean(slowed.stalls), "late_p50_s": median(late)}
    figures["late_p99_s"] = float(np.percentile(late, 99))
    return made, asdict(added) | figures
