"""FINCH: the prompt is read chunk by chunk with the question behind each, which says what stays of all that was read.

Corallo and Papotti 2024, "FINCH: Prompt-guided Key-Value Cache Compression for Large Language Models"
(arXiv:2408.00167), section 3: a later token of the question shares its attention out among more entries, so each row
counts as many times as it sees entries. What stays grows with what has been read. The pool never holds the whole
prompt, though a prompt that it could not hold is refused as with any technique. The paper moves entries together; here
they keep their positions, and each head chooses, as in kvpress.
"""

from dataclasses import dataclass

import numpy as np

from twostroke.engine.strokes import Decode, Prefill, Prefilled, Program
from twostroke.fields import integer, number
from twostroke.kv.attention import Queries, attention_weights
from twostroke.kv.cache import KVCache
from twostroke.methods.by_head import MAX_OBSERVED, best
from twostroke.methods.method import Method, Prompt


@dataclass(frozen=True)
class Finch(Method, name="finch"):
    """Decode from the entries that the prompt's last tokens attend to, chosen while the rest is read before them."""

    ratio: float = number(0.5, above=0, most=1)  # the share of the prompt's entries that each head keeps
    # how many it keeps, instead of a ratio; sinks and the question are among them
    budget: int | None = integer(None, least=1)
    sinks: int = integer(0, least=0)  # how many of the very first entries always stay
    question: int = integer(32, least=1, most=MAX_OBSERVED)  # how many of the prompt's last tokens choose, and stay
    chunk: int = integer(512, least=1)  # how many of the others are read at once

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.sinks + self.question
        fine = self.budget is None or self.budget >= least
        self.require("budget", fine, f"an integer of at least {least} (sinks + question), or None")

    @property
    def by_head(self) -> bool:
        return True

    def program(self, prompt: Prompt) -> Program:
        text, question = prompt[: -self.question], prompt[-self.question :]
        room = max(self.sinks, (self.budget or int(self.ratio * len(prompt))) - len(question))
        kv: KVCache | None = None
        for start in range(0, len(text) or 1, self.chunk):
            stop = min(start + self.chunk, len(text))
            made: Prefilled = yield Prefill([*text[start:stop], *question], kv, queries=len(question))
            stays = max(min(self.sinks, stop), room * stop // max(1, len(text)))
            kv = self.staying(made, stays)
            if stop < len(text):
                kv = kv[: -len(question)].resumed_at(stop)
            del made  # it would keep the pages of dropped entries
        assert kv is not None
        yield Decode(kv)

    def staying(self, made: Prefilled, count: int) -> KVCache:
        """So many entries of each head, and the question's behind them."""
        asking, length = len(made.queries), len(made.kv)
        if count >= length - asking:
            return made.kv
        worth = relevance(made.kv, made.queries)[..., :-asking]
        worth[..., : self.sinks] = np.inf
        asked = np.broadcast_to(np.arange(length - asking, length), (*worth.shape[:2], asking))
        return made.kv.gather(np.concatenate([best(worth, count), asked], -1))


def relevance(kv: KVCache, queries: Queries) -> np.ndarray:
    """The attention that entries get in each head from the last ones, whose rows count as many times as they see
    entries: [layers, KV heads, len(kv)]."""
    sees = np.arange(len(kv) - len(queries), len(kv), dtype=np.float32)[:, None] + 1
    heads = kv.pool.geometry.kv_heads or 0
    rows = ((weights * sees).mean(1) for weights in attention_weights(kv, queries))
    return np.stack([one.reshape(heads, -1, len(kv)).mean(1) for one in rows])
