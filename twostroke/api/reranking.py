"""How well documents answer a query, as Qwen3-Reranker tells it: whether "yes" or "no" comes next.

The prompt, its default instruction and the score are those of the model's card. It takes prefills alone.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.api.embedding import BatchRoom
from twostroke.backends.interface import CompiledModel
from twostroke.engine.strokes import Prefill, Prefilled, Program
from twostroke.errors import InvalidRequest
from twostroke.kv.cache import KVCache
from twostroke.kv.common_prefix import common_prefix_length
from twostroke.models.checkpoints.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_ROWS = 64  # rows whose logits exist at once


@dataclass(frozen=True)
class Reranker:
    """A model that was trained to rank."""

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
