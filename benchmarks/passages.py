"""TTFT and right answers where passages were read before, each alone, against reading the whole prompt.

    python -m benchmarks.passages --models qwen2.5-coder-0.5b qwen2.5-coder-1.5b --items 40

Each prompt has passages of Wikipedia, and one sentence in each that tells a number; it asks for one of them. Every
passage is computed as a context of a server is, in another order than it is asked in. Then it is found in the pool,
and, once the prefix index is empty, on disk.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.results_file import save
from benchmarks.terminal import command_line
from twostroke.api.llm import LLM
from twostroke.api.request_maker import NO_ANSWER
from twostroke.engine.options import FIRST_LAYERS
from twostroke.engine.request import Request
from twostroke.methods import Method, Passages, Plain, Prompt
from twostroke.models.checkpoints.chat_passages import PASSAGE, PassageTokens, encode_chat
from twostroke.server.contexts.held_kv import holding
from twostroke.study.evaluate.task import random_stream
from twostroke.study.evaluate.tasks.ruler import drawn_words, essay, fill, hidden, number

MODELS = ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"]
SIZES = [2, 4, 8, 16]  # passages of a prompt
TOKENS = 500  # of a passage
METHODS: dict[str, Method] = {
    "plain": Plain(),
    "nothing mended": Passages(first=0),
    "epic": Passages(),
    "cacheblend": Passages(mend="cacheblend"),
}
DEFINITIONS = {
    "right": "share of the answers that have the number asked for",
    "ttft_s": "first token - arrival; the median over items",
    "found": "tokens of the prompt found in that tier, the mean; the cost gate may have passages on disk computed",
    "deviation": "the technique's estimate of the error, the mean",
    "kl": "KL(plain || joined) of the first token in nats, the mean, by a run of its own",
}


@dataclass(frozen=True)
class Question:
    """A prompt with named passages, and the number that is asked for."""

    ids: PassageTokens
    answer: str

    @classmethod
    def drawn(cls, llm: LLM, rng: random.Random, passages: int, tokens: int) -> Question:
        names = drawn_words(rng, passages)
        values = {name: number(rng) for name in names}
        texts: list[str] = []
        for name, value in values.items():
            needle = f"The secret value of {name} is {value}."
            room = tokens - len(llm.tokenizer.encode(needle))
            texts.append(hidden(rng, [needle], fill(llm.tokenizer, essay(rng), room)))
        asked = rng.choice(names)
        question = f"What is the secret value of {asked} in the texts above? Answer with the value alone."
        said = [{"role": "user", "content": "".join([*[f"{PASSAGE}\n\n" for _ in texts], question])}]
        ids = encode_chat(llm.tokenizer, said, texts)
        assert isinstance(ids, PassageTokens)
        return cls(ids, values[asked])


def read(llm: LLM, question: Question) -> None:
    """Compute the passages, the last one first, and write them to the disk."""
    prompt = Prompt(question.ids, llm.tokenizer)
    for passage in reversed(prompt.passages):
        ids = prompt.alone(passage)
        llm.engine.run([Request(partial(holding, llm, ids, b""), NO_ANSWER, llm.tokenizer, len(ids))])
    if not llm.tiers.flush(120.0):
        raise TimeoutError("what was computed was not written within two minutes")


def forget(llm: LLM) -> None:
    """Empty the prefix indexes; what is on disk stays."""
    for model in llm.engine.models.values():
        if model.index is not None:
            model.index.clear()


def ask(llm: LLM, question: Question, method: Method, tier: str) -> dict[str, Any]:
    (made,) = llm.generate([question.ids], max_tokens=24, method=method)
    return {
        "right": question.answer in made.text,
        "ttft_s": made.timings.tokens[0] - (made.timings.arrival or 0.0),
        "found": made.cached_by_tier.get(tier, 0),
        "deviation": getattr(made.facts, "deviation", None),
        "kl": getattr(made.facts, "kl", None),
    }


def answers(llm: LLM, question: Question) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(technique, where its passages are, the answer's numbers) of each technique and place."""
    for name, method in METHODS.items():
        forget(llm)
        if not isinstance(method, Passages):
            yield name, "computed", ask(llm, question, method, "pool")
            continue
        read(llm, question)
        one = ask(llm, question, method, "pool")
        one["kl"] = ask(llm, question, replace(method, checked=1.0), "pool")["kl"]
        yield name, "pool", one
        forget(llm)
        yield name, "disk", ask(llm, question, method, "disk")


def measure(model: str, sizes: Sequence[int], items: int, tokens: int) -> dict[str, Any]:
    """All numbers of passages and techniques, from the pool and from disk."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for size in sizes:
        with tempfile.TemporaryDirectory() as disk, LLM(model, kv_disk=disk, draft=FIRST_LAYERS) as llm:
            for index in range(items):
                rng = random_stream(0, "passages", size, tokens, index)
                question = Question.drawn(llm, rng, size, tokens)
                for name, tier, one in answers(llm, question):
                    runs.setdefault(f"{size} {name} {tier}", []).append(one)
    return {name: _summary(made) for name, made in runs.items()}


def _summary(made: Sequence[dict[str, Any]]) -> dict[str, Any]:
    known = {key: [one[key] for one in made if one[key] is not None] for key in made[0]}
    means = {key: sum(values) / len(values) for key, values in known.items() if values}
    return means | {"ttft_s": median(known["ttft_s"]), "items": len(made)}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--passages", nargs="+", type=int, default=SIZES)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a passage")
    parser.add_argument("--items", type=int, default=20)
    options = parser.parse_args()
    for model in options.models:
        facts = measure(model, options.passages, options.items, options.tokens)
        print(
            f"{model}\n{'passages, technique, where':<32}{'right':>7}{'TTFT':>9}{'found':>8}{'deviation':>11}{'KL':>8}"
        )
        for name, one in facts.items():
            gap, kl = (f"{one[key]:.3f}" if key in one else "" for key in ("deviation", "kl"))
            print(f"{name:<32}{one['right']:>7.0%}{one['ttft_s']:>8.2f}s{one['found']:>8.0f}{gap:>11}{kl:>8}")
        print(save("passages", DEFINITIONS, Path(model).name, facts))


if __name__ == "__main__":
    main()
