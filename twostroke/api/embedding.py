"""Embeddings: the hidden states of a text's tokens, pooled into one vector. It takes prefills alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from twostroke.engine.strokes import Prefill, Prefilled, Program
from twostroke.errors import CheckpointError, InvalidRequest
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.pooling import Pooling
from twostroke.models.checkpoints.tokenizer import Tokenizer


class BatchRoom(NamedTuple):
    """What prefills that run side by side may take: tokens of several steps, and entries of whole pages."""

    tokens: int
    entries: int
    page_size: int

    def batches(self, inputs: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
        """The inputs in order, as many at once as there is room for, and at least one."""
        start = tokens = entries = 0
        for i, one in enumerate(inputs):
            more = -(-len(one) // self.page_size) * self.page_size
            if i > start and (tokens + len(one) > self.tokens or entries + more > self.entries):
                yield inputs[start:i]
                start, tokens, entries = i, 0, 0
            tokens, entries = tokens + len(one), entries + more
        if start < len(inputs):
            yield inputs[start:]


@dataclass(frozen=True)
class Embedder:
    """One model's embeddings."""

    pooling: Pooling  # which hidden states count
    norm: np.ndarray  # weights of the last norm, [hidden] float32; eps: what it adds to the mean square
    eps: float

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Embedder":
        """That of a checkpoint. Raises CheckpointError if a dense layer does not fit."""
        made = cls(checkpoint.pooling, checkpoint.tensor("norm").dequantize(), checkpoint.config.norm_eps)
        size = len(made.norm)
        for weight, _ in made.pooling.dense:
            if weight.shape[1] != size:
                raise CheckpointError(f"{checkpoint.name}: a dense layer takes {weight.shape[1]} numbers, not {size}")
            size = len(weight)
        return made

    def encode(
        self, tokenizer: Tokenizer, text: str | Sequence[int], prompt: str | None = None, most: int | None = None
    ) -> list[int]:
        """The tokens of a text, with those that the tokenizer puts around it. Token ids are taken as they are.

        Args:
            tokenizer: the model's.
            text: the text or its ids.
            prompt: the name of what comes before it, of the model's prompts.
            most: cut the text so that it has at most so many tokens.

        Raises InvalidRequest: nothing is left to read, or there is no such prompt, or no embedding.
        """
        pooling = self.pooling
        if pooling.refusal is not None:
            raise InvalidRequest(pooling.refusal)
        named = pooling.default_prompt if prompt is None else prompt
        if prompt is not None and prompt not in pooling.prompts:
            known = ", ".join(pooling.prompts) or "none"
            raise InvalidRequest(f"prompt_name must be one of the model's prompts ({known}), not {prompt!r:.60}")
        before = pooling.prompts.get(named or "", "")
        if isinstance(text, str):
            tokens, around = tokenizer.encode(before + text), tokenizer.encode("")
            kept = len(around) - tokenizer.add_bos
        else:
            tokens, kept = [*(tokenizer.encode(before) if before else ()), *text], 0
        if not tokens or (isinstance(text, str) and not text and not before and not kept):
            raise InvalidRequest("input must be texts or lists of token ids that are not empty")
        if most is not None and len(tokens) > most:
            tokens = [*tokens[: most - kept], *tokens[len(tokens) - kept :]]
        return tokens

    def program(self, inputs: Sequence[Sequence[int]], room: BatchRoom) -> Program:
        """The program of one request. Its result is the pooled vector of each input, [size] float32."""
        made: list[np.ndarray] = []
        for batch in room.batches(inputs):
            whole = self.pooling.mode != "last"
            results: list[Prefilled] = yield [Prefill(one, hidden=len(one) if whole else 1) for one in batch]
            made += [self.pooled(result.hidden) for result in results]
            del results  # the pages of a batch are free before the next one begins
        return made

    def pooled(self, hidden: np.ndarray | None) -> np.ndarray:
        """[n, hidden] before the last norm -> [size] float32. Each row's bits depend on that row alone."""
        assert hidden is not None
        rows = np.stack([self._normed(row) for row in (hidden[:1] if self.pooling.mode == "cls" else hidden)])
        made = (rows.sum(0) / len(rows)).astype(np.float32)
        for dense in self.pooling.dense:
            made = dense(made)
        return made

    @property
    def size(self) -> int:
        """Numbers of an embedding that is not cut."""
        return len(self.pooling.dense[-1].weight) if self.pooling.dense else len(self.norm)

    def _normed(self, row: np.ndarray) -> np.ndarray:
        wide = row.astype(np.float64)
        return wide / np.sqrt(np.mean(wide * wide) + self.eps) * self.norm

    def finish(self, pooled: np.ndarray, dimensions: int | None = None, normalized: bool | None = None) -> np.ndarray:
        """Cut to the first `dimensions`, and divide by the length. Raises InvalidRequest for too many dimensions."""
        if dimensions is not None and not 1 <= dimensions <= len(pooled):
            raise InvalidRequest(f"dimensions must be from 1 to {len(pooled)}, not {dimensions}")
        made = pooled[:dimensions].astype(np.float64)
        if self.pooling.normalized if normalized is None else normalized:
            made /= max(float(np.sqrt((made * made).sum())), 1e-12)
        return made.astype(np.float32)
