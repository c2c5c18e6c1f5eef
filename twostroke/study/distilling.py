"""Distillation of a student for some minutes: forward KL to the teacher's logits, with the teacher's KV as prefix.

This follows OverFill (Kim et al. 2025). The teacher reads a window of text. From a random position on, the student
reads the same tokens with the teacher's entries before them, and is trained towards the teacher's distributions. The
optimizer is AdamW with warm-up and cosine decay, in float32, with PyTorch's autograd over the reference's operations.

This recovers only a part of the loss of pruning. The literature trains on billions of tokens; a few minutes on a CPU
are about ten thousand. Memory: teacher and student in float32 and the student's gradients and moments, 4 bytes per
weight of the teacher and 16 of the student. The training data is the given text, not the model's answers.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from twostroke.backends.interface import RaggedBatch
from twostroke.backends.reference.activations import capped
from twostroke.backends.reference.decoder import ReferenceDecoder
from twostroke.backends.reference.operations import DenseWeight, Operations, TensorBatch
from twostroke.errors import InvalidRequest
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.models.config import Attention
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.layer_groups import layer_groups
from twostroke.study.pruning import write_tensors

WINDOW = 256  # tokens of text in one context
BATCH = 2  # windows per step
WARM_UP = 0.1  # share of the steps
HELD_OUT = 8  # one window in 8 is held out


@dataclass(frozen=True)
class Distillation:
    """The result of a distillation."""

    tokens: int  # number of tokens that the student read, including repeated ones
    seconds: float  # duration of all steps
    losses: list[float]  # per step, mean KL(teacher || student) of the next token in nats, over the step's tokens
    # before, after: the same on the held-out windows, before the first step and after the last
    before: float
    after: float


class Differentiable(Operations):
    """The reference's operations over one sequence without pages, so that autograd applies; `kv` is the prefix.

    `kv` of each layer is [2, P, Hkv, D]. `weights` collects the packed tensors as (names, rows of each, tensor).
    """

    def __init__(self, learning: bool) -> None:
        super().__init__()
        self.learning = learning
        self.weights: list[tuple[list[str], list[int], torch.Tensor]] = []

    def pack(self, parts: Sequence[RawTensor], bias: Sequence[RawTensor] = ()) -> DenseWeight:
        weight = super().pack(parts, bias)
        for sources, tensor in ((parts, weight.matrix), (bias, weight.bias)):
            if tensor is not None:
                tensor.requires_grad_(self.learning)
                self.weights.append(([s.name for s in sources], [s.shape[0] for s in sources], tensor))
        return weight

    def rope_store(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor,
        batch: TensorBatch,
        group: int,
        attention: Attention,
        norms: Sequence[DenseWeight],
        eps: float,
    ) -> torch.Tensor:
        q, k, v = self.turned(qkv, kv.shape[2], batch, attention, norms, eps)
        assert k is not None
        assert v is not None
        batch.scratch.setdefault("entries", []).append(torch.cat([kv, torch.stack([k, v])], dim=1))
        return q

    def attention(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        batch: TensorBatch,
        group: int,
        attention: Attention,
        cap: float | None,
        sink_logits: torch.Tensor | None = None,
        place: int = 0,
    ) -> torch.Tensor:
        assert sink_logits is None, "of families that are not distilled"
        k, v = batch.scratch["entries"][-1].transpose(1, 2)
        own, keys = batch.positions[:, None], torch.arange(k.shape[1])
        seen = (keys <= own) & (keys > own - (attention.window or k.shape[1]))
        if cap is None:
            out = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, seen, scale=attention.scale, enable_gqa=True)
            return out.transpose(0, 1).flatten(1)
        k, v = (side.repeat_interleave(q.shape[1] // len(side), dim=0) for side in (k, v))
        scores = capped(q.transpose(0, 1) @ k.transpose(1, 2) * attention.scale, cap).masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


class WindowModel:
    """A model that reads windows of text."""

    def __init__(self, checkpoint: Checkpoint, learning: bool) -> None:
        """Raises InvalidRequest for a model with recurrent layers, or with logits of sinks."""
        if checkpoint.config.state_layers or any(one.sink_logits for one in checkpoint.config.attentions):
            raise InvalidRequest(f"{checkpoint.name} has layers that no pass here differentiates: choose another model")
        self.config, self.operations = checkpoint.config, Differentiable(learning)
        self.decoder = ReferenceDecoder(self.config, self.operations, checkpoint.tensor)

    def __call__(self, tokens: torch.Tensor, before: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits of every token, [N, vocab]; all entries, [layers, 2, P + N, Hkv, D]), with prefix `before`."""
        c = self.config
        kv = torch.zeros(c.num_layers, 2, 0, c.num_kv_heads, c.head_dim) if before is None else before
        start, nowhere, rows = kv.shape[2], torch.zeros(0, dtype=torch.int64), torch.arange(len(tokens))
        batch: RaggedBatch[Any] = RaggedBatch(tokens, start + rows, nowhere, nowhere, [0, len(rows)], [], rows)
        groups = [kv[list(group.layers)] for group in layer_groups(c, "float32")]
        logits = self.decoder.logits(self.decoder.forward(batch, groups, nowhere)[0])
        return logits, torch.stack(batch.scratch["entries"])

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights by their Twostroke names."""
        found: dict[str, torch.Tensor] = {}
        for names, rows, tensor in self.operations.weights:
            found |= zip(names, tensor.detach().split(rows), strict=True)
        return found


def windows_of(teacher: Checkpoint, text: str, max_tokens: int = 16384) -> list[torch.Tensor]:
    """The text's first `max_tokens` tokens in windows of 256. Raises InvalidRequest if there are fewer than two."""
    tokens = torch.tensor(Tokenizer.from_source(teacher.tokenizer_source).encode(text)[:max_tokens])
    if len(tokens) < 2 * WINDOW:
        raise InvalidRequest(f"distillation needs at least {2 * WINDOW} tokens of text, not {len(tokens)}")
    return [window for window in tokens.split(WINDOW) if len(window) == WINDOW]


def distill(
    teacher: Checkpoint,
    directory: Path,
    # two or more, [256] token ids each. Every eighth is held out. A step uses two, drawn at random.
    windows: Sequence[torch.Tensor],
    steps: int,  # number of optimizer steps
    *,
    learning_rate: float = 3e-4,  # the maximum, reached after a tenth of the steps
    seed: int = 0,
    progress: Callable[[int, float], None] | None = None,  # called after each step with (steps done, loss)
) -> Distillation:
    """Train the student in a directory that `prune` wrote, and write it back. The same seed gives the same student.

    Raises:
        InvalidRequest: no steps, or a learning rate that is not between 0 and 1.
    """
    if steps < 1 or not 0 < learning_rate < 1:
        raise InvalidRequest(f"distillation needs steps, at a rate between 0 and 1, not {steps} at {learning_rate}")
    held, learned = windows[::HELD_OUT], [window for i, window in enumerate(windows) if i % HELD_OUT]
    wise, student = WindowModel(teacher, learning=False), WindowModel(open_checkpoint(str(directory)), learning=True)

    def loss(window: torch.Tensor, start: int) -> torch.Tensor:
        """Mean KL on a window, of which the student reads the tokens from `start` on."""
        with torch.no_grad():
            expected, kv = wise(window)
        said, _ = student(window[start:], kv[:, :, :start])
        logs = F.log_softmax(said, -1), F.log_softmax(expected[start:], -1)
        return F.kl_div(*logs, reduction="batchmean", log_target=True)

    @torch.no_grad()
    def judged() -> float:
        return float(np.mean([loss(window, WINDOW // 2).item() for window in held]))

    def rate(step: int) -> float:
        """The learning rate at a step, as a share of the maximum."""
        warm = max(1, round(WARM_UP * steps))
        return (step + 1) / warm if step < warm else (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2

    parameters = [tensor for _, _, tensor in student.operations.weights]
    optimizer = torch.optim.AdamW(parameters, learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    random, before, losses, entered = np.random.default_rng(seed), judged(), list[float](), 0
    began = time.perf_counter()
    for step in range(steps):
        total = 0.0
        for choice in random.integers(len(learned), size=BATCH):
            start = int(random.integers(WINDOW // 4, WINDOW * 3 // 4))
            one = loss(learned[choice], start) / BATCH
            one.backward()
            total, entered = total + one.item(), entered + WINDOW - start
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
        if progress is not None:
            progress(step + 1, total)
    seconds = time.perf_counter() - began
    write_tensors(student.config, student.tensors(), directory)
    return Distillation(entered, seconds, losses, before, judged())
