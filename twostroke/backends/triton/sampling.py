"""Sampling on the device: a step's logits stay there, and a few numbers per row cross over."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from twostroke.backends.triton.kernels import filters
from twostroke.backends.triton.kernels import sampling as kernels
from twostroke.backends.triton.pass_plan import power_of_two
from twostroke.sampling.draw import COLDEST, Draw, Noise, Sampled
from twostroke.sampling.params import SamplingParams
from twostroke.sampling.statistics import NO_TOKEN

WORDS = kernels.WORDS.value  # of a draw
BLOCK = kernels.BLOCK.value
CUT_BLOCK = filters.CUT_BLOCK.value
NOISE_ALONE = SamplingParams()
# The parameters that kernels compute, and those that do not change how a token is drawn from its logits.
SUPPORTED = frozenset(("temperature", "top_k", "top_p", "min_p", "seed")) | frozenset(
    ("max_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "n", "reader",
     "include_stop_str_in_output", "skip_special_tokens")
)  # fmt: skip


@dataclass(frozen=True)
class SearchBuffers:
    """Memory of a search over at most R rows. One may be used by one call at a time."""

    # values, columns: [R, blocks] float32 and int32, what each block has found
    values: torch.Tensor
    columns: torch.Tensor
    sums: torch.Tensor  # [R, 2, blocks] float32
    # cuts, found: [R, 2] float64 and [R, CUT_BLOCK] float32, for filters
    cuts: torch.Tensor
    found: torch.Tensor


def supports(draw: Draw) -> bool:
    """Whether the token can be drawn on the device, and nothing is reported about it."""
    return supports_report(draw) and not draw.reports


def supports_report(draw: Draw) -> bool:
    """Whether the token can be drawn on the device, and what is reported about it be found there."""
    return draw.params.changed <= SUPPORTED and draw.allowed is None and not draw.banned and not draw.keep_logits


def words(draws: Sequence[Draw | Noise]) -> np.ndarray:
    """Encode each draw's noise and filters for the kernels: int64 [R, WORDS]."""
    packed = np.zeros((len(draws), WORDS), np.int64)
    floats = packed.view(np.float64)
    for i, draw in enumerate(draws):
        params, noise = (NOISE_ALONE, draw) if isinstance(draw, Noise) else (draw.params, draw.noise)
        floats[i, kernels.GAIN.value] = noise.gain
        if noise.key is not None:
            packed[i, kernels.KEY.value] = noise.key - ((noise.key >> 63) << 64)
            packed[i, kernels.DRAWN.value] = 1
        floats[i, kernels.TOP_P.value], floats[i, kernels.MARGIN.value] = 1.0, -math.inf
        if params.filters and noise.key is not None:
            packed[i, kernels.TOP_K.value] = min(params.top_k, 2**31 - 1)
            floats[i, kernels.TOP_P.value] = params.top_p
            if params.min_p:
                floats[i, kernels.MARGIN.value] = max(params.temperature, COLDEST) * math.log(params.min_p)
    return packed


class DeviceSampler:
    """Draws tokens from logits on a device. A row's token depends only on its logits and its draw.

    Logits are [R, vocab] float32 whose rows may be further apart than `vocab`. All calls only launch kernels: nothing
    waits for the device, and with `out` and `buffers` given nothing is allocated, so they can be captured in a graph.

    Without filters tokens are those of the native backend given the same logits, up to how logits are computed. Filters
    work in float32 weights, which are counted in units of 2^-40 so that their sums are exact; a token whose cumulated
    probability is within about 1e-6 of `top_p` may be on the other side than in the CPU's double precision.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)

    def buffers(self, rows: int, vocab: int) -> SearchBuffers:
        """Memory for calls with at most this many rows, and exactly this vocabulary."""
        blocks = -(-vocab // BLOCK)
        return SearchBuffers(
            torch.empty((rows, blocks), dtype=torch.float32, device=self.device),
            torch.empty((rows, blocks), dtype=torch.int32, device=self.device),
            torch.empty((rows, 2, blocks), dtype=torch.float32, device=self.device),
            torch.empty((rows, 2), dtype=torch.float64, device=self.device),
            torch.empty((rows, CUT_BLOCK), dtype=torch.float32, device=self.device),
        )

    def send(self, draws: Sequence[Draw | Noise]) -> torch.Tensor:
        """The draws' words on the device: [R, WORDS] int64."""
        return torch.from_numpy(words(draws)).to(self.device, non_blocking=True)

    def draw(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """Tokens of draws that are supported: int32 [R]."""
        filtered = any(draw.params.filters for draw in draws)
        return self.search(logits, self.send(draws), filtered=filtered)

    def search(
        self,
        logits: torch.Tensor,
        draws: torch.Tensor,  # [R, WORDS] int64, see `words`
        filtered: bool = False,  # whether a row has filters. Rows without any are searched whole, to the same result.
        out: torch.Tensor | None = None,  # where the ids are written
        buffers: SearchBuffers | None = None,
    ) -> torch.Tensor:
        """Find each row's id with the largest logit * gain + noise: int32 [R], the lowest in a tie.

        It is NO_TOKEN where a logit is NaN or infinite, or all are -inf.
        """
        rows, vocab = _checked(logits)
        ids = torch.empty(rows, dtype=torch.int32, device=self.device) if out is None else out
        if not rows:
            return ids
        buffers = self.buffers(rows, vocab) if buffers is None else buffers
        stride, blocks = logits.stride(0), buffers.values.shape[1]
        if filtered:
            filters.cut_rows[(rows,)](
                logits,
                stride,
                vocab,
                draws,
                buffers.cuts,
                buffers.found,
                CUT_BLOCK,
                num_warps=16,
            )
        kernels.search_blocks[(rows, blocks)](
            logits, stride, vocab, draws, buffers.cuts, buffers.values, buffers.columns, blocks, filtered, BLOCK,
            num_warps=4,
        )  # fmt: skip
        kernels.search_ends[(rows,)](
            logits, stride, buffers.values, buffers.columns, blocks, ids, power_of_two(blocks), num_warps=4
        )
        return ids

    def statistics(
        self,
        logits: torch.Tensor,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
        buffers: SearchBuffers | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's most likely id, int32 [R], and [R, 3] float32: its logit, logsumexp, and entropy in nats.

        The numbers are NaN where a logit is NaN or infinite, or all are -inf. A logit of -inf has probability 0.
        """
        rows, vocab = _checked(logits)
        if out is None:
            out = (
                torch.empty(rows, dtype=torch.int32, device=self.device),
                torch.empty((rows, 3), dtype=torch.float32, device=self.device),
            )
        if not rows:
            return out
        buffers = self.buffers(rows, vocab) if buffers is None else buffers
        blocks = buffers.values.shape[1]
        kernels.summarize_blocks[(rows, blocks)](
            logits, logits.stride(0), vocab, buffers.values, buffers.columns, buffers.sums, blocks, BLOCK,
            num_warps=4,
        )  # fmt: skip
        kernels.summarize_ends[(rows,)](
            buffers.values, buffers.columns, buffers.sums, blocks, *out, power_of_two(blocks),
            num_warps=4,
        )  # fmt: skip
        return out

    def likeliest(self, logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` most likely ids of each row, [R, count] int64 in falling order, and their logits [R, count].

        Ties go to the lower id: what is compared is an integer of 64 bits, the logit above and the id below, and no
        two of them are equal. -inf comes last, and NaN above or below everything.
        """
        _, vocab = _checked(logits)
        bits = (logits + 0.0).view(torch.int32)  # -0 becomes 0, and equals it
        keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) << 32
        keys |= torch.arange(vocab - 1, -1, -1, device=self.device)
        ids = vocab - 1 - (torch.topk(keys, min(count, vocab), dim=-1).values & 0xFFFFFFFF)
        return ids, logits.gather(-1, ids)

    def report(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[Sampled]:
        """Tokens with what their draws want to know of them, see `supports_report`. Waits for the device."""
        ids = self.draw(logits, draws)
        best, numbers = self.statistics(logits)
        counts = [draw.params.logprobs or 0 for draw in draws]
        others, values = self.likeliest(logits, max(1, *counts))
        whole = torch.stack((ids, best), 1).cpu().tolist()
        single = torch.cat((numbers, self.at(logits, ids)[:, None], values), 1).cpu().tolist()
        made: list[Sampled] = []
        rows = zip(draws, counts, whole, single, others.cpu().tolist(), strict=True)
        for draw, count, (id, first), (top, total, entropy, logit, *high), likeliest in rows:
            if not draw.reports or id == NO_TOKEN or math.isnan(total):
                made.append(Sampled(NO_TOKEN if draw.reports and math.isnan(total) else id))
                continue
            sampled = Sampled(id, (top if id == first else logit) - total)
            if draw.stats:
                sampled = replace(
                    sampled, entropy=max(0.0, entropy / math.log(2)), top_probability=math.exp(top - total)
                )
            if draw.params.logprobs is not None:
                pairs = zip(likeliest[:count], high[:count], strict=True)
                sampled = replace(sampled, top=tuple((other, value - total) for other, value in pairs))
            made.append(sampled)
        return made

    def at(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The logit of one id of each row, int32 [R]: float32 [R]. NO_TOKEN takes that of id 0."""
        return logits.gather(-1, ids.clamp(min=0).to(torch.int64)[:, None])[:, 0]


def _checked(logits: torch.Tensor) -> tuple[int, int]:
    """The shape. Raises ValueError if these are no logits of the form that kernels read."""
    if logits.ndim != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1 or not logits.shape[1]:
        raise ValueError(f"logits must be [rows, vocab] float32 with adjacent columns, not {logits.shape}")
    return logits.shape[0], logits.shape[1]
