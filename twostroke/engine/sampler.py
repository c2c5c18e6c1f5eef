"""From logits to tokens: each row by itself, so that what else is in the batch changes nothing."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from twostroke.engine.sampling import SamplingParams
from twostroke.kernels import summary
from twostroke.kernels.summary import CHUNK, COLDEST, Statistics, Summary, argmax

# How many candidates top_p looks at before it sorts all, which takes long.
FEW = (512, 4096)
MOST_GROUPED = 64


@dataclass(frozen=True)
class Draw:
    """One row to sample.

    Attributes:
        params: its request's.
        seed, index: the random number is a function of these two alone.
        prompt, output: int token ids so far, for penalties.
        banned: ids that may not be sampled (ending tokens before min_tokens).
        allowed: bool [n], the only ids that may be; None for all.
        stats: whether log-probability, entropy and top probability are wanted.
        keep_logits: whether the row's logits are wanted.
        keep_proposal: whether the distribution that is drawn from is wanted.
        guess: a token and the distribution it was drawn from, [vocab], to be accepted or replaced.
    """

    params: SamplingParams
    seed: bytes
    index: int
    prompt: np.ndarray
    output: Sequence[int]
    banned: Sequence[int] = ()
    allowed: np.ndarray | None = None
    stats: bool = False
    keep_logits: bool = False
    keep_proposal: bool = False
    guess: tuple[int, torch.Tensor] | None = None


@dataclass(frozen=True)
class Sampled:
    """A sampled token. Log-probabilities are the model's own, before temperature and penalties.

    Attributes:
        logprob: None unless alternatives or stats were asked for, as the likeliest token is found without it.
        entropy: of the model's distribution, in bits; None unless asked for.
        top_probability: of its most likely token.
        top: the most likely ids with their log-probabilities.
        logits: [vocab] float32.
        proposal: [vocab] float64, what it was drawn from; None where nothing was drawn (temperature 0).
    """

    id: int
    logprob: float | None = None
    entropy: float | None = None
    top_probability: float | None = None
    top: tuple[tuple[int, float], ...] | None = None
    logits: torch.Tensor | None = None
    proposal: torch.Tensor | None = None


def sample(logits: torch.Tensor, draws: Sequence[Draw], statistics: Statistics = summary) -> list[Sampled]:
    """Sample a token from each row of [R, vocab] float32 logits, with a backend's own statistics."""
    shaped, found = logits, statistics.summarize(logits)
    ids, best = list(found.best), found.top
    if any(draw.params.shapes_logits for draw in draws):
        shaped = logits.clone()
        for row, draw in zip(shaped, draws, strict=True):
            _shape(row, draw)
        ids = argmax(shaped)
        best = shaped[list(range(len(ids))), ids].tolist()
    proposals: list[torch.Tensor | None] = [None] * len(draws)
    # Where even the largest logit is not finite there is nothing to draw from.
    drawn = [i for i, draw in enumerate(draws) if draw.params.temperature > 0 and math.isfinite(best[i])]
    weighed = {i: max(draws[i].params.temperature, COLDEST) for i in drawn if _wants_weights(draws[i])}
    sums = statistics.weigh(shaped, best, [weighed.get(i, 0) for i in range(len(draws))]) if weighed else None
    for i in drawn:
        ids[i] = _draw(shaped[i], draws[i], best[i], sums[i] if sums is not None and i in weighed else None)
        proposals[i] = _dense(shaped[i], draws[i].params) if draws[i].keep_proposal else None
    return [_report(draw, ids[i], logits[i], found, i, proposals[i]) for i, draw in enumerate(draws)]


def _wants_weights(draw: Draw) -> bool:
    """Whether the weights of all ids count for what is drawn."""
    params = draw.params
    return draw.guess is None and not params.top_k and (params.top_p < 1 or not params.min_p)


def _shape(row: torch.Tensor, draw: Draw) -> None:
    """Bias, penalties and bans, in place. Ids that this model does not have are passed over."""
    params = draw.params
    if params.logit_bias:
        known = {id: bias for id, bias in params.logit_bias.items() if id < len(row)}
        row[list(known)] += torch.tensor(list(known.values())).to(row)
    if params.repetition_penalty != 1.0:
        seen = _ids(np.concatenate([draw.prompt, np.array(draw.output, np.int64)]), row)
        scores = row[seen]
        row[seen] = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and draw.output:
        counts = torch.bincount(_ids(np.array(draw.output, np.int64), row), minlength=len(row)).to(row)
        row -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
    if draw.index < params.min_tokens and draw.banned:
        row[_ids(np.array(draw.banned, np.int64), row)] = -torch.inf
    if draw.allowed is not None:
        count = min(len(draw.allowed), len(row))
        row[:count].masked_fill_(torch.from_numpy(~draw.allowed[:count]).to(row.device), -torch.inf)
        row[count:] = -torch.inf


def _ids(ids: np.ndarray, row: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(ids[(ids >= 0) & (ids < len(row))]).long().to(row.device)


def _draw(row: torch.Tensor, draw: Draw, top: float, sums: np.ndarray | None) -> int:
    """One token: the guess if it is accepted, else by inverse transform. `sums` are those of weights by chunks."""
    if draw.guess is not None:
        return _judge(row, draw, *draw.guess)
    params, number = draw.params, uniform(draw.seed, draw.index)
    if sums is not None and params.top_p == 1:
        chunk, rest = _walk(sums.astype(np.float64), number)
        scores = row[chunk * CHUNK : (chunk + 1) * CHUNK].double().cpu().numpy()
        return chunk * CHUNK + _walk(np.exp((scores - top) / max(params.temperature, COLDEST)), rest)[0]
    total = None if sums is None else float(sums.sum(dtype=np.float64))
    probabilities, ids = distribution(row, params, top, total)
    place, _ = _walk(probabilities.cpu().numpy(), number)
    return place if ids is None else int(ids[place])


def _walk(weights: np.ndarray, number: float) -> tuple[int, float]:
    """Inverse transform: where a number from 0 to 1 leads among cumulated weights, and how far into that weight."""
    ends = weights.cumsum()
    wanted = number * ends[-1]
    # From the right it steps over candidates of no probability, also where the number drawn is exactly 0; and rounding
    # must not lead past the last candidate that has any.
    place = int(min(ends.searchsorted(wanted, "right"), ends.searchsorted(ends[-1])))
    return place, float(min(max(1 - (ends[place] - wanted) / weights[place], 0), 1))


def _judge(row: torch.Tensor, draw: Draw, guess: int, proposal: torch.Tensor) -> int:
    """Speculative sampling (Leviathan et al. 2023, section 2.3; Chen et al. 2023, algorithm 2).

    With p what the token should be drawn from and q what the guess was drawn from, it stands with probability
    min(1, p / q), and is else replaced by one drawn from max(0, p - q): together that is p.
    """
    p = _dense(row, draw.params)
    q = torch.nn.functional.pad(proposal, (0, max(0, len(p) - len(proposal))))[: len(p)].to(p)
    if uniform(draw.seed + b"accept", draw.index) * float(q[guess]) < float(p[guess]):
        return guess
    rest = (p - q).clamp_min(0)
    return _walk((rest if rest.any() else p).cpu().numpy(), uniform(draw.seed, draw.index))[0]


def _dense(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What a token is drawn from as float64 [vocab], ids left out having no probability."""
    probabilities, ids = distribution(row, params)
    if ids is None:
        return probabilities
    return torch.zeros(len(row), dtype=probabilities.dtype, device=row.device).scatter_(0, ids, probabilities)


def distribution(
    row: torch.Tensor, params: SamplingParams, top: float | None = None, total: float | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a token is drawn from: (float64 probabilities, their ids or None for all ids in order).

    `row` is [vocab] logits, of which the largest must be finite; temperature must be above 0. `top` is that
    logit and `total` the sum of all weights, exp((logit - top) / temperature), where known; with top_k none is wanted.
    """
    top = float(_array(row).max()) if top is None else top

    def weigh(ids: torch.Tensor | None) -> torch.Tensor:
        return (((row if ids is None else row[ids]).double() - top) / params.temperature).exp()

    ids = None
    if params.top_k:
        ids = _likeliest(row, params.top_k)
    elif params.top_p < 1:
        total = float(weigh(None).sum()) if total is None else total
        ids = _enough(row, weigh, params.top_p * total)
    elif params.min_p:  # most are far too small, which shows without their weights
        floor = top + params.temperature * (math.log(params.min_p) - 1e-3) - 1e-5 * abs(top)
        ids = _tensor(np.flatnonzero(_array(row) >= floor), row)
    weights = weigh(ids)
    if ids is not None and params.top_p < 1:
        goal = params.top_p * (float(weights.sum()) if total is None else total)
        kept = 1 + int((weights.cumsum(-1) < goal).sum())
        ids, weights = ids[:kept], weights[:kept]
    if params.min_p:
        weights = weights.where(weights >= params.min_p, 0)  # the largest is 1
    return weights / weights.sum(), ids


def _enough(row: torch.Tensor, weigh: Callable[[torch.Tensor], torch.Tensor], goal: float) -> torch.Tensor:
    """The likeliest ids: as many as have weights that reach the goal, or all."""
    for count in FEW:
        ids = _likeliest(row, count)
        if weigh(ids).cumsum(-1)[-1] >= goal:
            return ids
    return _likeliest(row, len(row))


def _likeliest(row: torch.Tensor, count: int) -> torch.Tensor:
    """The ids of so many largest values and of all equal to the last of them, falling, equal ones by id."""
    values = _array(row)
    ids = np.flatnonzero(values >= _floor(values, count)) if count < len(values) else np.arange(len(values))
    found = values[ids]
    if count < len(found):
        ids = ids[found >= np.partition(found, -count)[-count]]
    return _tensor(ids[np.argsort(-values[ids], kind="stable")], row)


def _floor(values: np.ndarray, count: int) -> float:
    """What at least `count` values are not below, and few more: the last of so many groups with the largest tops."""
    size = min(MOST_GROUPED, max(1, len(values) // (4 * count)))
    groups = len(values) // size
    tops = values[: groups * size].reshape(size, groups).max(0)
    return float(np.partition(tops, -count)[-count])


def _array(row: torch.Tensor) -> np.ndarray:
    """On a CPU, numpy does what follows in a fraction of the time of PyTorch, which shares it among threads."""
    return row.detach().cpu().numpy()


def _tensor(ids: np.ndarray, row: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(ids).to(row.device)


def uniform(seed: bytes, index: int) -> float:
    """A number in [0, 1) that depends on seed and token index alone."""
    digest = hashlib.blake2b(index.to_bytes(8, "little"), key=seed, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def _report(
    draw: Draw, token: int, logits: torch.Tensor, summary: Summary, place: int, proposal: torch.Tensor | None
) -> Sampled:
    def logprob(logit: float) -> float:
        return logit - summary.logsumexp[place]

    own = entropy = top_probability = top = None
    if draw.stats or draw.params.logprobs is not None:
        own = logprob(summary.top[place] if token == summary.best[place] else logits[token].item())
    if draw.stats:
        entropy = max(0.0, summary.entropy[place] / math.log(2))
        top_probability = math.exp(logprob(summary.top[place]))
    if (count := draw.params.logprobs) is not None:
        ids = _likeliest(logits, max(1, count))[:count]
        top = tuple((id, logprob(logit)) for id, logit in zip(ids.tolist(), logits[ids].tolist(), strict=True))
    return Sampled(token, own, entropy, top_probability, top, logits.clone() if draw.keep_logits else None, proposal)
