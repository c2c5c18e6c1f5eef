"""Whether a model answers twenty ordinary questions correctly, each judged by a list of words.

    python -m benchmarks.plain_questions --models smollm2-135m qwen2.5-coder-0.5b

Each question is asked alone through the model's chat template, once greedily and three times sampled with the model's
generation defaults, as in `chat` and the server. An answer is correct if it contains one of the accepted words as a
whole word. This is lenient towards longer answers. It shows whether a model is fit to be the default; it does not rank
models.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.api.llm import LLM
from twostroke.errors import TwostrokeError

DRAWN = 3  # sampled answers to each question
MOST_TOKENS = 96


@dataclass(frozen=True)
class Question:
    text: str
    accepted: tuple[str, ...]  # lower case; one of them must be in the answer


QUESTIONS = [
    Question("What is the capital of France?", ("paris",)),
    Question("What is 2 + 2?", ("4", "four")),
    Question("What colour is the sky on a clear day?", ("blue",)),
    Question("What is the opposite of hot?", ("cold",)),
    Question("How many days are in a week?", ("7", "seven")),
    Question("Which planet do we live on?", ("earth",)),
    Question("What is the largest ocean on Earth?", ("pacific",)),
    Question("Who wrote Romeo and Juliet?", ("shakespeare",)),
    Question("How many legs does a spider have?", ("8", "eight")),
    Question("What do bees make?", ("honey",)),
    Question("What is frozen water called?", ("ice",)),
    Question("Which month comes after March?", ("april",)),
    Question("What is 10 minus 3?", ("7", "seven")),
    Question("What is the capital of Japan?", ("tokyo",)),
    Question("Is a whale a fish or a mammal?", ("mammal", "mammals")),
    Question("What is the plural of mouse, the animal?", ("mice",)),
    Question("How many minutes are in an hour?", ("60", "sixty")),
    Question("Which animal says meow?", ("cat", "cats")),
    Question("What do you call a baby dog?", ("puppy", "puppies", "pup")),
    Question("At what temperature in degrees Celsius does water boil?", ("100", "hundred")),
]


def is_right(answer: str, accepted: Sequence[str]) -> bool:
    """Whether the answer contains one of the accepted words as a whole word."""
    words = re.findall(r"[a-z]+|\d+", answer.lower())
    return any(word in words for word in accepted)


def ask(llm: LLM, **sampling: Any) -> list[str]:
    """The answers to all questions, in order."""
    prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": question.text}]) for question in QUESTIONS]
    return [answer.text for answer in llm.generate(prompts, max_tokens=MOST_TOKENS, **sampling)]


def row(name: str, llm: LLM, show: bool) -> str:
    """A row of the table: the number of correct answers, greedy, and sampled on average."""
    greedy = ask(llm)
    drawn = [ask(llm, **llm.generation, seed=seed) for seed in range(DRAWN)]
    if show:
        for question, answer in zip(QUESTIONS, greedy, strict=True):
            mark = "+" if is_right(answer, question.accepted) else "-"
            print(f"{mark} {question.text} {' '.join(answer.split())[:100]}", file=sys.stderr)

    def count(answers: Sequence[str]) -> int:
        return sum(is_right(answer, question.accepted) for question, answer in zip(QUESTIONS, answers, strict=True))

    mean = sum(map(count, drawn)) / DRAWN
    defaults = ", ".join(f"{key} {value:g}" for key, value in llm.generation.items())
    return f"| {name} | {count(greedy)} | {mean:.1f} | {defaults} |"


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description="Twenty plain questions: how many a model answers correctly.")
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
    parser.add_argument("--show", action="store_true", help="print the greedy answers to stderr")
    arguments = parser.parse_args()
    print(f"| of {len(QUESTIONS)} | greedy | drawn, mean of {DRAWN} | drawn with |\n|---|---|---|---|")
    for name in arguments.models:
        try:
            print(row(name, LLM(name, kv_bytes=256 << 20), arguments.show), flush=True)
        except TwostrokeError as error:
            sys.exit(f"{name}: {error}")


if __name__ == "__main__":
    main()
