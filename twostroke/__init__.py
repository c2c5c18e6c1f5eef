"""Twostroke: an LLM inference engine of two strokes whose KV cache is a value you hold.

from twostroke import LLM, AsyncLLM, SamplingParams          a model, and how its tokens are chosen
from twostroke import KVCache, Conversation                  values of KV, and a chat that extends one
from twostroke import Prefill, Decode, Emit, Method, method  techniques: programs over strokes
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# PyTorch's OpenMP threads wait by spinning, and beside another busy process each of hundreds of waits a step may last
# a time slice (docs/log.md): let them spin briefly. Read once, when torch is loaded; what you set yourself stays.
os.environ.setdefault("GOMP_SPINCOUNT", "4000")

if TYPE_CHECKING:
    from twostroke.api.async_llm import AsyncDecoding, AsyncLLM
    from twostroke.api.completion import Completion, Decoding
    from twostroke.api.conversation.conversation import Conversation
    from twostroke.api.llm import LLM
    from twostroke.engine.output import Token
    from twostroke.engine.strokes import Decode, Decoded, Emit, Prefill, Prefilled, Program
    from twostroke.errors import TwostrokeError
    from twostroke.kv.cache import KVCache
    from twostroke.methods import Method, Prompt, method
    from twostroke.sampling.params import SamplingParams

__all__ = [
    "LLM", "AsyncDecoding", "AsyncLLM", "Completion", "Conversation", "Decode", "Decoded", "Decoding", "Emit",
    "KVCache", "Method", "Prefill", "Prefilled", "Program", "Prompt", "SamplingParams", "Token", "TwostrokeError",
    "method",
]  # fmt: skip

_HOMES = {
    "twostroke.api.async_llm": ("AsyncDecoding", "AsyncLLM"),
    "twostroke.api.completion": ("Completion", "Decoding"),
    "twostroke.api.conversation.conversation": ("Conversation",),
    "twostroke.engine.output": ("Token",),
    "twostroke.engine.strokes": ("Decode", "Decoded", "Emit", "Prefill", "Prefilled", "Program"),
    "twostroke.errors": ("TwostrokeError",),
    "twostroke.kv.cache": ("KVCache",),
    "twostroke.api.llm": ("LLM",),
    "twostroke.methods": ("Method", "Prompt", "method"),
    "twostroke.sampling.params": ("SamplingParams",),
}


def __getattr__(name: str) -> Any:
    # Importing the package stays quick: what these need is loaded when the first of them is asked for.
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'twostroke' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
