"""Explanations of how the engine answers a prompt. Every number comes from the engine itself."""

from twostroke.study.explain.attention import TokenAttention, attention_of, attention_request
from twostroke.study.explain.explanation import ExplainOptions, Explanation, as_json, explain
from twostroke.study.explain.html_page import page, write_page

__all__ = [
    "ExplainOptions", "Explanation", "TokenAttention", "as_json", "attention_of", "attention_request", "explain",
    "page", "write_page",
]  # fmt: skip
