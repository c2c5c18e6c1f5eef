"""Sampling tokens from logits. Each row is sampled independently of the rest of the batch."""

import math
from collections.abc import Sequence

import numpy as np

from twostroke.sampling import statistics as summary
from twostroke.sampling.draw import COLDEST, NO_NOISE, Draw, Sampled, gumbel
from twostroke.sampling.params import SamplingParams
from twostroke.sampling.statistics import MIN_LOGIT, NO_TOKEN, RowStatistics, Statistics, likeliest, picked, sound
from twostroke.system.scratch import ScratchMemory

# Numbers of candidates that top_p tries before it sorts the whole vocabulary, which is slow.
TOP_P_CANDIDATES = (512, 4096, 32768)
ROOM = ScratchMemory()  # buffer for changed logits


def sample(
    logits: np.ndarray, draws: Sequence[Draw], statistics: Statistics = summary, made: RowStatistics | None = None
) -> list[Sampled]:
    """Sample a token from each row of `logits`, [R, vocab] float32, which are not changed.

    The id is NO_TOKEN where the model's logits are NaN or infinite; other rows are not affected.

    Args:
        statistics: the backend's implementation of statistics.
        made: statistics of these rows, if the head already computed them.
    """
    shaped = logits
    if any(draw.params.shapes_logits for draw in draws):
        np.copyto(shaped := ROOM.array(*logits.shape), logits)
        with np.errstate(over="ignore", invalid="ignore"):  # extreme biases and penalties may overflow
            for row, draw in zip(shaped, draws, strict=True):
                shape_logits(row, draw)
    noises = [NO_NOISE if draw.params.filters else draw.noise for draw in draws]  # filters need the most likely id

    greedy = shaped is logits and all(noise == NO_NOISE for noise in noises)
    found = None
    if greedy or any(draw.reports for draw in draws):
        found = statistics.summarize(logits) if made is None else made
    ids = list(found.best) if greedy and found is not None and found.finite else statistics.draw(shaped, noises)
    if any(draw.params.filters for draw in draws):
        _draw_filtered(shaped, draws, ids, statistics)
    ids = sound(logits, ids)
    if found is not None and any(draw.reports for draw in draws):
        found = _with_infinities(logits, found)
        ids = [
            NO_TOKEN if draw.reports and math.isnan(total) else id
            for id, draw, total in zip(ids, draws, found.logsumexp, strict=True)
        ]
    alternatives = _alternatives(logits, draws, found, statistics)
    return [_report(draw, ids[i], logits[i], found, i, alternatives[i]) for i, draw in enumerate(draws)]


def _with_infinities(logits: np.ndarray, found: RowStatistics) -> RowStatistics:
    """The statistics, also of rows with logits of -inf, for which a backend may give nan."""
    odd = [i for i, total in enumerate(found.logsumexp) if math.isnan(total)]
    if not odd:
        return found
    own = summary.summarize(logits[odd])
    best, top, logsumexp, entropy = list(found.best), list(found.top), list(found.logsumexp), list(found.entropy)
    for j, i in enumerate(odd):
        best[i], top[i], logsumexp[i], entropy[i] = own.best[j], own.top[j], own.logsumexp[j], own.entropy[j]
    return RowStatistics(best, top, logsumexp, entropy)


def _draw_filtered(rows: np.ndarray, draws: Sequence[Draw], ids: list[int], statistics: Statistics) -> None:
    """For rows with filters, replace the most likely id in `ids` with a draw from the ids that the filters keep."""
    tops = picked(rows, ids).tolist()
    # If even the largest logit is not finite, there is nothing to draw from.
    filtered = [
        i
        for i, draw in enumerate(draws)
        if draw.params.filters and draw.noise.key is not None and math.isfinite(tops[i])
    ]
    gains, counts, floors = [0.0] * len(draws), [0] * len(draws), [0.0] * len(draws)
    for i in filtered:
        params = draws[i].params
        counts[i], floors[i] = _looked_at(params, tops[i], rows.shape[1])
        gains[i] = draws[i].noise.gain if params.top_p < 1 and not params.top_k else 0.0
    totals = statistics.weigh(rows, tops, gains) if any(gains) else gains
    found = statistics.likeliest(rows, counts, floors)
    for i in filtered:
        chances, left = distribution(rows[i], draws[i].params, tops[i], totals[i] or None, found[i])
        with np.errstate(divide="ignore"):
            ids[i] = int(left[(np.log(chances) + gumbel(draws[i].noise.key or 0, left)).argmax()])


def shape_logits(row: np.ndarray, draw: Draw) -> None:
    """Apply bias, penalties, bans and the constraint's mask in place. Ids outside the vocabulary are ignored."""
    params = draw.params
    if params.logit_bias:
        known = {id: bias for id, bias in params.logit_bias.items() if id < len(row)}
        row[list(known)] += np.array(list(known.values()), np.float32)
    if params.repetition_penalty != 1.0:
        seen = _ids(np.concatenate([draw.prompt, np.array(draw.output, np.int64)]), row)
        scores, penalty = row[seen], np.float32(params.repetition_penalty)
        row[seen] = np.where(scores > 0, scores / penalty, scores * penalty)
    if (params.presence_penalty or params.frequency_penalty) and draw.output:
        counts = np.bincount(_ids(np.array(draw.output, np.int64), row), minlength=len(row))
        row -= (params.presence_penalty * (counts > 0) + params.frequency_penalty * counts).astype(np.float32)
    if draw.index < params.min_tokens and draw.banned:
        row[_ids(np.array(draw.banned, np.int64), row)] = -np.inf
    if draw.allowed is not None:
        count = min(len(draw.allowed), len(row))
        row[:count][~draw.allowed[:count]] = -np.inf
        row[count:] = -np.inf


def _ids(ids: np.ndarray, row: np.ndarray) -> np.ndarray:
    return ids[(ids >= 0) & (ids < len(row))]


def distribution(
    values: np.ndarray,
    params: SamplingParams,
    top: float | None = None,
    total: float | None = None,
    found: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The distribution that a token is drawn from: (probabilities [k] float64, ids [k]).

    `values` are logits [vocab], the largest of which must be finite; temperature must be above 0. If already known,
    pass the largest logit as `top`, the sum of all weights exp((logit - top) / temperature) as `total`, and the ids
    that filters look at first as `found`.
    """
    top = float(values.max()) if top is None else top

    def weigh(ids: np.ndarray) -> np.ndarray:
        return np.exp((values[ids].astype(np.float64) - top) / max(params.temperature, COLDEST))

    if not params.filters:
        weights = weigh(ids := np.arange(len(values)))
        return weights / weights.sum(), ids
    count, floor = _looked_at(params, top, len(values))
    ids = _likeliest(values, count, floor) if found is None else found
    if params.top_k or params.top_p < 1:
        ids = _falling(values, ids)
    weights = weigh(ids)
    if params.top_p < 1:
        if params.top_k:
            total = float(weights.sum())
        elif total is None:
            total = float(weigh(np.arange(len(values))).sum())
        goal = params.top_p * total
        for count in (*TOP_P_CANDIDATES[1:], len(values)) if not params.top_k else ():
            if weights.cumsum()[-1] >= goal:
                break
            weights = weigh(ids := _falling(values, _likeliest(values, count)))
        kept = 1 + int((weights.cumsum() < goal).sum())
        ids, weights = ids[:kept], weights[:kept]
    if params.min_p:
        weights[weights < params.min_p] = 0  # the largest is 1
    return weights / weights.sum(), ids


def _looked_at(params: SamplingParams, top: float, size: int) -> tuple[int, float]:
    """The number of largest logits that filters look at first, out of `size`, and a lower bound for these logits."""
    if params.top_k:
        return min(size, params.top_k), MIN_LOGIT
    if params.top_p < 1:
        return min(size, *TOP_P_CANDIDATES[:1]) if TOP_P_CANDIDATES else size, MIN_LOGIT
    # With min_p most logits are far too small, which is known without their weights.
    return size, top + params.temperature * (math.log(params.min_p) - 1e-3) - 1e-5 * abs(top)


def _likeliest(values: np.ndarray, count: int, floor: float = MIN_LOGIT) -> np.ndarray:
    return likeliest(values[None], [count], [floor])[0]


def _falling(values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Ids by descending float32 value, ties by id. Sorting integers takes a tenth of the time of a stable sort."""
    bits = (0.0 - values[ids]).view(np.int32)
    keys = (bits ^ (bits >> 31 & 0x7FFFFFFF)).astype(np.int64) << 32 | ids
    return np.sort(keys) & 0xFFFFFFFF


def _alternatives(
    logits: np.ndarray, draws: Sequence[Draw], found: RowStatistics | None, statistics: Statistics
) -> list[np.ndarray]:
    """The most likely ids of rows that report them, in descending order; ids with a logit of -inf come last."""
    if found is None or all(draw.params.logprobs is None for draw in draws):
        return [np.arange(0)] * len(draws)
    counts = [
        0 if draw.params.logprobs is None or not math.isfinite(top) else min(len(row), max(1, draw.params.logprobs))
        for row, draw, top in zip(logits, draws, found.top, strict=True)
    ]
    likeliest = statistics.likeliest(logits, counts, [MIN_LOGIT] * len(draws))
    ordered: list[np.ndarray] = []
    for row, count, ids in zip(logits, counts, likeliest, strict=True):
        falling = _falling(row, ids)[:count]
        if len(ids) < count:
            falling = np.append(falling, np.flatnonzero(row == -math.inf)[: count - len(ids)])
        ordered.append(falling)
    return ordered


def _report(
    draw: Draw, token: int, logits: np.ndarray, summary: RowStatistics | None, place: int, alternatives: np.ndarray
) -> Sampled:
    own = entropy = top_probability = top = None
    if summary is not None and draw.reports and token != NO_TOKEN:
        likeliest, best = summary.best[place], summary.top[place]

        def logprob(logit: float) -> float:
            return logit - summary.logsumexp[place]

        own = logprob(best if token == likeliest else float(logits[token]))
        if draw.stats:
            entropy = max(0.0, summary.entropy[place] / math.log(2))
            top_probability = math.exp(logprob(best))
        if (count := draw.params.logprobs) is not None:
            ids = alternatives[:count]
            top = tuple((id, logprob(logit)) for id, logit in zip(ids.tolist(), logits[ids].tolist(), strict=True))
    return Sampled(token, own, entropy, top_probability, top, logits.copy() if draw.keep_logits else None)
