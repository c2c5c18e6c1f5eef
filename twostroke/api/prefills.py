"""What a model tells by prefills alone: embeddings of texts, their classes, and how well documents answer a query."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from twostroke.backends.interface import CompiledModel
from twostroke.engine.strokes import Prefill, Prefilled, Program
from twostroke.errors import CheckpointError, InvalidRequest
from twostroke.kv.cache import KVCache
from twostroke.kv.common_prefix import common_prefix_length
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.classes import ClassHead
from twostroke.models.checkpoints.pooling import Pooling
from twostroke.models.checkpoints.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_ROWS = 64  # rows whose logits exist at once


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


@dataclass(frozen=True)
class TextClass:
    """What a model says of a text.

    Attributes:
        label: the class with the largest score.
        scores: by label: probabilities, or the logits themselves of a model for regression.
    """

    label: str
    scores: dict[str, float]


@dataclass(frozen=True)
class Classifier:
    """One model's classes. `embedder` gives the last token's hidden state behind the last norm."""

    head: ClassHead
    embedder: Embedder

    @classmethod
    def of(cls, checkpoint: Checkpoint, embedder: Embedder) -> "Classifier | None":
        """That of a checkpoint; None for one without such a head."""
        head = checkpoint.classes
        return None if head is None else cls(head, replace(embedder, pooling=Pooling("last")))

    def finish(self, pooled: np.ndarray) -> TextClass:
        """The class of a text with this hidden state, [hidden]. Its bits depend on that text alone."""
        head = self.head
        logits = (head.weight.astype(np.float64) * pooled).sum(1) + (0 if head.bias is None else head.bias)
        match head.activation:
            case "softmax":
                odds = np.exp(logits - logits.max())
                scores = odds / odds.sum()
            case "sigmoid":
                scores = 1 / (1 + np.exp(-logits))
            case "none":
                scores = logits
        return TextClass(head.labels[int(np.argmax(scores))], dict(zip(head.labels, scores.tolist(), strict=True)))


@dataclass(frozen=True)
class Reranker:
    """A model that was trained to rank: how well documents answer a query is whether "yes" or "no" comes next.

    The prompt, its default instruction and the score are those of Qwen3-Reranker's card.
    """

    # before, after: tokens around each pair
    before: tuple[int, ...]
    after: tuple[int, ...]
    # yes, no: ids of the two answers
    yes: int
    no: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, name: str, ranks: bool) -> "Reranker | None":
        """That of a model; None for one that was not trained to rank.

        Nothing in the files of Qwen3-Reranker tells it from a model that generates, so its name does.

        Args:
            tokenizer: the model's.
            name: the checkpoint's name.
            ranks: whether a GGUF file says that the model ranks.
        """
        known = {text: tokenizer.backend.token_to_id(text) for text in ("yes", "no", "<|im_start|>", "<|im_end|>")}
        yes, no = known["yes"], known["no"]
        if yes is None or no is None or None in known.values():
            return None
        if not (ranks or re.search("re-?rank", name, re.IGNORECASE)):
            return None
        before, after = (tuple(tokenizer.encode(text, add_bos=False)) for text in (_BEFORE, _AFTER))
        return cls(before, after, yes, no)

    def pair(self, tokenizer: Tokenizer, query: str, document: str, instruction: str | None = None) -> list[int]:
        """The prompt's tokens. No text is a special token. Raises InvalidRequest for what UTF-8 cannot encode."""
        text = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        return [*self.before, *tokenizer.encode(text, add_bos=False, parse_special=False), *self.after]

    def program(self, pairs: Sequence[list[int]], room: BatchRoom, model: CompiledModel) -> Program:
        """The program of one request. Its result is a score of each pair, the probability of "yes" against "no".

        What all pairs begin with is entered once.
        """
        shared = min(common_prefix_length(min(pairs), max(pairs)), min(map(len, pairs)) - 1)
        kv: KVCache = yield Prefill(pairs[0][:shared], logits="none")
        hidden: list[np.ndarray] = []
        for batch in room.batches([pair[shared:] for pair in pairs]):
            results: list[Prefilled] = yield [Prefill(one, kv, hidden=1) for one in batch]
            hidden += [result.hidden for result in results if result.hidden is not None]
            del results  # the pages of a batch are free before the next one begins
        scores: list[float] = []
        for start in range(0, len(hidden), _ROWS):
            logits = model.rows_of(np.concatenate(hidden[start : start + _ROWS])).read()[:, [self.yes, self.no]]
            odds = logits[:, 1].astype(np.float64) - logits[:, 0]
            scores += (1 / (1 + np.exp(odds))).tolist()
        return scores


def broadcast(one: Sequence[str], other: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of texts: each with each of an equal list, or one with all. Raises InvalidRequest."""
    if not one or not other or (len(one) != len(other) and len(one) != 1):
        raise InvalidRequest(f"text_1 must be one text, or as many as text_2: not {len(one)} beside {len(other)}")
    return [(one[0] if len(one) == 1 else one[i], text) for i, text in enumerate(other)]
