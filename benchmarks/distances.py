"""What benchmarks of number formats share: texts to read, logits behind them, and how far they are from others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.strokes import Program
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.sampling.params import SamplingParams
from twostroke.study.evaluate.statistics import bootstrap
from twostroke.study.evaluate.wikipedia import articles


def texts(tokenizer: Tokenizer, length: int) -> Iterator[list[int]]:
    """Pieces of `length` + 1 tokens, of Wikipedia's articles one after another."""
    held: list[int] = []
    for article in articles():
        held += tokenizer.encode(article)
        while len(held) > length:
            yield held[: length + 1]
            held = held[length + 1 :]


def result(llm: LLM, program: Callable[[], Program]) -> Any:
    """What a program returns."""
    request = Request(program, SamplingParams(), llm.tokenizer)
    llm.engine.run([request])
    return request.result


def interval(values: np.ndarray) -> list[float]:
    """[mean, low, high] of one value for each text: 95%, bootstrap."""
    mean = bootstrap(values)
    return [mean.value, mean.low, mean.high]


def distance(each: Sequence[np.ndarray]) -> dict[str, Any]:
    """KL with its interval over texts, and the share of equal likeliest tokens; `each`: a text's `compare`."""
    _, kl, same = np.stack(each, 1)
    mean, *ends = interval(kl.mean(-1))
    return {"kl": mean, "kl_interval": ends, "top1": float(same.mean())}
