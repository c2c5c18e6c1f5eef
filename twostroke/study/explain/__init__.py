"""What the engine does with a prompt, step by step: every number is its own."""

from twostroke.study.explain.attention import TokenAttention, attention_of, attention_request
from twostroke.study.explain.explanation import Aspects, Explanation, as_json, explain
from twostroke.study.explain.page import page, write_page

__all__ = [
    "Aspects",
    "Explanation",
    "TokenAttention",
    "as_json",
    "attention_of",
    "attention_request",
    "explain",
    "page",
    "write_page",
]
