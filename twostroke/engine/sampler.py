"""From logits to tokens: each row by itself, so that what else is in the batch changes nothing."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from twostroke.engine.sampling import SamplingParams


@dataclass(frozen=True)
class Draw:
    """One row to sample.

    Attributes:
        params: its request's.
        seed, index: the random number is a function of these two alone.
        prompt, output: int token ids so far, for penalties.
        banned: ids that may not be sampled (ending tokens before min_tokens).
        stats: whether entropy and top probability are wanted.
        keep_logits: whether the row's logits are wanted.
    """

    params: SamplingParams
    seed: bytes
    index: int
    prompt: np.ndarray
    output: Sequence[int]
    banned: Sequence[int] = ()
    stats: bool = False
    keep_logits: bool = False


@dataclass(frozen=True)
class Sampled:
    """A sampled token. Log-probabilities are the model's own, before temperature and penalties.

    Attributes:
        entropy: of the model's distribution, in bits; None unless asked for.
        top_probability: of its most likely token.
        top: the most likely ids with their log-probabilities.
        logits: [vocab] float32.
    """

    id: int
    logprob: float
    entropy: float | None = None
    top_probability: float | None = None
    top: tuple[tuple[int, float], ...] | None = None
    logits: torch.Tensor | None = None


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """Sample a token from each row of [R, vocab] float32 logits."""
    shaped = logits
    if any(draw.params.shapes_logits for draw in draws):
        shaped = logits.clone()
        for row, draw in zip(shaped, draws, strict=True):
            _shape(row, draw)
    ids = shaped.argmax(-1).tolist()
    for i, draw in enumerate(draws):
        if draw.params.temperature > 0:
            ids[i] = _draw(shaped[i], draw)
    norms = torch.logsumexp(logits, -1)
    chosen = (logits[torch.arange(len(ids)), ids] - norms).tolist()
    return [_report(*row) for row in zip(draws, ids, chosen, logits, norms, strict=True)]


def _shape(row: torch.Tensor, draw: Draw) -> None:
    """Bias, penalties and bans, in place."""
    params = draw.params
    if params.logit_bias:
        row[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()), device=row.device)
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.concatenate([draw.prompt, np.array(draw.output, np.int64)]))).long()
        scores = row[seen]
        row[seen] = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and draw.output:
        ids, counts = (torch.from_numpy(a) for a in np.unique(np.array(draw.output, np.int64), return_counts=True))
        row[ids] -= params.presence_penalty + params.frequency_penalty * counts.to(row)
    if draw.index < params.min_tokens and draw.banned:
        row[list(draw.banned)] = -torch.inf


def _draw(row: torch.Tensor, draw: Draw) -> int:
    """One token by inverse transform: order the candidates, walk their cumulated probability up to one number."""
    params = draw.params
    scores, ids = row.double() / params.temperature, None
    if params.top_k or params.top_p < 1:
        scores, ids = scores.topk(min(params.top_k, len(row))) if params.top_k else scores.sort(descending=True)
    probabilities = scores.softmax(-1)
    if params.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.where(before < params.top_p, 0)
    if params.min_p:
        probabilities = probabilities.where(probabilities >= params.min_p * probabilities.max(), 0)
    ends = probabilities.cumsum(-1)
    # right=True steps over candidates of no probability, also where the number drawn is exactly 0.
    place = int(torch.searchsorted(ends, ends[-1:] * uniform(draw.seed, draw.index), right=True))
    place = min(place, int(probabilities.nonzero()[-1]))
    return place if ids is None else int(ids[place])


def uniform(seed: bytes, index: int) -> float:
    """A number in [0, 1) that depends on seed and token index alone."""
    digest = hashlib.blake2b(index.to_bytes(8, "little"), key=seed, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def _report(draw: Draw, token: int, logprob: float, row: torch.Tensor, norm: torch.Tensor) -> Sampled:
    entropy = top_probability = top = None
    if draw.stats:
        logprobs = row - norm
        # xlogy-like: a probability of 0 contributes 0, not nan.
        terms = torch.where(logprobs > -torch.inf, logprobs.exp() * logprobs, 0)
        entropy = max(0.0, float(-terms.sum() / np.log(2)))
        top_probability = float(logprobs.max().exp())
    if draw.params.logprobs is not None:
        values, ids = (row - norm).topk(min(draw.params.logprobs, len(row)))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Sampled(token, logprob, entropy, top_probability, top, row.clone() if draw.keep_logits else None)
