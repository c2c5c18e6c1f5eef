"""Twostroke: an LLM inference engine of two strokes whose KV cache is a value you hold."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# PyTorch's OpenMP threads wait by spinning, and beside another busy process each of hundreds of waits a step may last
# a time slice (docs/log.md): let them spin briefly. Read once, when torch is loaded; what you set yourself stays.
os.environ.setdefault("GOMP_SPINCOUNT", "4000")

if TYPE_CHECKING:
    from twostroke.errors import TwostrokeError
    from twostroke.kv.cache import KVCache
    from twostroke.llm import LLM
    from twostroke.methods import method
    from twostroke.sampling.params import SamplingParams

__all__ = ["LLM", "KVCache", "SamplingParams", "TwostrokeError", "method"]

_HOMES = {
    "LLM": "twostroke.llm",
    "KVCache": "twostroke.kv.cache",
    "SamplingParams": "twostroke.sampling.params",
    "TwostrokeError": "twostroke.errors",
    "method": "twostroke.methods",
}


def __getattr__(name: str) -> Any:
    # Importing the package stays quick: what these need is loaded when the first of them is asked for.
    if name not in _HOMES:
        raise AttributeError(f"module 'twostroke' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
