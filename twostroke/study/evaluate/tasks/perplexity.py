"""Perplexity of real text: of an article's continuation, after a method has prefilled its beginning."""

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from twostroke.fields import integer
from twostroke.study.evaluate.task import Item, Task
from twostroke.study.evaluate.wikipedia import SOURCE, articles

if TYPE_CHECKING:
    from twostroke.models.checkpoints.tokenizer import Tokenizer


@dataclass(frozen=True)
class Perplexity(Task):
    """An item is the beginning of a Wikipedia article; its answer is what follows. No chat template is involved."""

    name = "perplexity"
    measures = ("likelihood",)
    about = f"{SOURCE.description} ({SOURCE.licence}), from the package gensim"

    context: int = integer(256, least=1, help="Tokens that are prefilled as the prompt.")
    length: int = integer(128, least=1, help="Tokens that follow and are scored.")

    def items(self, tokenizer: "Tokenizer", limit: int, seed: int) -> list[Item]:
        """In the order of the file. The seed changes nothing, since there are few articles."""
        size = self.context + self.length
        starts = ((i, tokenizer.encode(text[: 16 * size])[:size]) for i, text in enumerate(articles()))
        whole = ((i, tuple(ids)) for i, ids in starts if len(ids) == size)
        return [Item(f"article-{i}", ids[: self.context], (ids[self.context :],)) for i, ids in islice(whole, limit)]
