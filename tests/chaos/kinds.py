"""What clients ask for: kinds of requests, each with parameters of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tests.chaos.letters import TEXTS, VOCAB, grammar
from twostroke.cluster.dynamo_request import DynamoRequest
from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.methods import Method, OverFill, Plain, Prompt, Refresh
from twostroke.sampling.params import SamplingParams


@dataclass(frozen=True)
class Shaped(Method):
    """Some entries of the first half of the prompt, by head and with a bias, and behind them the second half.

    It has no name among the techniques, which other tests go through.
    """

    name: ClassVar[str] = "shaped"
    seed: int

    def program(self, prompt: Prompt) -> Program:
        kv = yield Prefill(prompt)
        rng, half = np.random.default_rng(self.seed), len(kv) // 2
        if half > 1:
            geometry = kv.pool.geometry
            shape = (len(geometry.kv_layers), geometry.kv_heads, half)
            count = int(rng.integers(1, half))
            chosen = np.sort(rng.permuted(np.broadcast_to(np.arange(half), shape), axis=-1)[..., :count], -1)
            first = kv[:half].gather(chosen)
            first = first.with_bias(rng.normal(size=(*shape[:2], count)).astype(np.float32))
            kv = first + kv[half:-1].at(first.next_position)
            kv = yield Prefill(list(prompt)[-1:], kv)
        yield Decode(kv)


KINDS = ("greedy", "sampled", "n = 2", "penalties", "stop", "grammar")
SHAPED = "shaped"  # entries by head, with a bias, and others in another place; of models with one kind of layers
TAUGHT = ("overfill", "refresh")  # the teacher is in the prefill worker, and the decode worker has the student alone


def ask(kind: str, rng: random.Random, prompt: list[int], most: int) -> DynamoRequest:
    """A request of a kind, with a prompt, for at most so many tokens."""
    params: dict[str, Any] = {"max_tokens": most, "seed": rng.randrange(1 << 30), "temperature": 1.0}
    params["ignore_eos"] = rng.random() < 0.9
    if kind in TAUGHT:
        params |= _drawn(rng.choice(KINDS), rng, most)
    else:
        params |= _drawn(kind, rng, most)
    return DynamoRequest(prompt, (), SamplingParams(**params), _method(kind, rng))


def _drawn(kind: str, rng: random.Random, most: int) -> dict[str, Any]:
    if kind == "greedy":
        return {"temperature": 0.0}
    if kind == "n = 2":
        return {"n": 2}
    if kind == "penalties":
        return {
            "frequency_penalty": rng.choice((0.5, -0.5)),
            "presence_penalty": rng.choice((0.0, 0.7)),
            "repetition_penalty": rng.choice((1.0, 1.3)),
            "logit_bias": {rng.randrange(VOCAB): rng.choice((-3.0, 3.0))},
            "logprobs": rng.choice((None, 0, 2)),
        }
    if kind == "stop":  # two tokens each, so that workers die in the middle of one
        pairs = [(rng.choice(TEXTS[:29]) + rng.choice(TEXTS[:29])).decode() for _ in range(8)]
        return {"stop": tuple(pairs), "min_tokens": rng.randint(0, most // 2)}
    if kind == "grammar":
        return {"constraint": grammar(), "ignore_eos": False, "temperature": rng.choice((0.0, 1.0))}
    return {}


def _method(kind: str, rng: random.Random) -> Method:
    if kind == SHAPED:
        return Shaped(rng.randrange(1 << 30))
    if kind == "overfill":
        return OverFill(recompute=rng.random() < 0.3)
    if kind == "refresh":
        when = rng.choice(("periodic", "entropy", "probe"))
        return Refresh(when=when, every=rng.choice((2, 5, 9)), window=rng.choice((None, 4)), threshold=1.0)
    return Plain()
