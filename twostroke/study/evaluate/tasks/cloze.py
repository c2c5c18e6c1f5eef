"""A word from one of several passages: what is left of passages that a technique shortens or drops?"""

import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.fields import integer
from twostroke.study.evaluate.task import Item, Task, random_stream
from twostroke.study.evaluate.wikipedia import SOURCE, articles

if TYPE_CHECKING:
    from twostroke.models.checkpoints.tokenizer import Tokenizer

BLANK = "____"
MIN_SENTENCE_WORDS = 8  # words of a sentence
_SENTENCE = re.compile(r"[A-Z].*?[.!?](?=\s|$)")
_WORD = re.compile(r"(?<=[a-z,] )[A-Z][a-z]{3,}\b")  # a proper noun within a sentence


@dataclass(frozen=True)
class Cloze(Task):
    """Passages of Wikipedia, each of its own article, then a sentence of one of them without a name that occurs once.

    The prompt has the form that prompt compression is made for: passages between blank lines, and the question last.
    An answer is right if it has the word.
    """

    name = "cloze"
    max_tokens = 12
    about = f"{SOURCE.description} ({SOURCE.licence}), from the package gensim"

    passages: int = integer(8, least=1, most=64, help="How many passages there are.")
    words: int = integer(80, least=30, most=1000, help="Most words of a passage, whole sentences.")

    def items(self, tokenizer: "Tokenizer", limit: int, seed: int) -> list[Item]:
        texts = [found for text in articles() if (found := self._passages(text))]
        return [
            self._item(random_stream(seed, self.name, self.passages, self.words, i), texts, i) for i in range(limit)
        ]

    def correct(self, item: Item, text: str) -> bool | None:
        return re.search(rf"\b{re.escape(str(item.answers[0]))}\b", text, re.IGNORECASE) is not None

    def _passages(self, article: str) -> list[list[str]]:
        """The sentences of each paragraph's beginning."""
        found: list[list[str]] = []
        for paragraph in article.split("\n\n"):
            kept: list[str] = []
            for sentence in _SENTENCE.findall(paragraph):
                if len(" ".join([*kept, sentence]).split()) > self.words:
                    break
                kept.append(sentence)
            if kept:
                found.append(kept)
        return found

    def _item(self, rng: random.Random, texts: list[list[list[str]]], index: int) -> Item:
        while True:
            chosen = [rng.choice(text) for text in rng.sample(texts, min(self.passages, len(texts)))]
            whole = "\n\n".join(" ".join(sentences) for sentences in chosen)
            gaps = [
                (sentence, word)
                for sentence in rng.choice(chosen)
                if len(sentence.split()) >= MIN_SENTENCE_WORDS
                for word in _WORD.findall(sentence)
                if len(re.findall(rf"\b{word}\b", whole, re.IGNORECASE)) == 1
            ]
            if gaps:
                break
        sentence, word = rng.choice(gaps)
        asked = re.sub(rf"\b{word}\b", BLANK, sentence)
        prompt = (
            f"{whole}\n\nOne of the passages above has this sentence, in which {BLANK} stands for one word: {asked} "
            f"Which word is it? Answer with the word alone."
        )
        return Item(f"{self.name}-{index}", prompt, (word,))
