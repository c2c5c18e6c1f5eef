"""The declaration of a model's options: the signature of `LLM` is the same, and bad ones are refused before a fetch."""

import inspect
import re
from typing import Any

import pytest

from twostroke.api import open_engine
from twostroke.api.llm import LLM
from twostroke.backends import choose
from twostroke.engine.options import (
    BACKENDS,
    DTYPES,
    KV_DTYPES,
    WEIGHTS,
    LLMOptions,
    companion_parts,
)
from twostroke.errors import InvalidRequest
from twostroke.fields import rules
from twostroke.models.checkpoints.quantize import FORMAT


def test_the_signature_of_llm_is_the_declaration() -> None:
    parameters = dict(inspect.signature(LLM).parameters)
    del parameters["progress"]  # a callback
    assert set(parameters) == set(rules(LLMOptions))
    assert {name: one.default for name, one in parameters.items()} == vars(LLMOptions())
    described = set(re.findall(r"^ {4}(\w+): ", inspect.getdoc(LLM.__init__) or "", re.MULTILINE))
    assert set(parameters) <= described


def test_choices_are_what_there_is() -> None:
    assert (BACKENDS, DTYPES, KV_DTYPES) == (choose.BACKENDS, choose.DTYPES, choose.KV_DTYPES)
    assert ("stored", *FORMAT) == WEIGHTS


@pytest.mark.parametrize(
    ("wanted", "parts"),
    [("int4", ("", "int4")), ("a/b", ("a/b", "stored")), ("m@int8", ("m", "int8")), ("stored", ("", "stored"))],
)
def test_names_of_companions(wanted: str, parts: tuple[str, str]) -> None:
    assert companion_parts(wanted) == parts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "magic"}, "backend must be one of auto, native, "),
        ({"backend": "native-magic"}, "backend must be one of"),
        ({"dtype": "int3"}, "dtype must be one of auto, float32, bfloat16, not 'int3'"),
        ({"weights": "int5"}, "weights must be one of"),
        ({"student": "int5"}, "weights must be one of"),
        ({"draft": "model@int5"}, "weights must be one of"),
        ({"prefix_index": "tree"}, "prefix_index must be one of radix, hash, off, not 'tree'"),
        ({"device": "nowhere"}, "device 'nowhere' cannot be used"),
        ({"device": 3}, "device must be a text, not 3"),
        ({"threads": 0}, "threads must be from 1 to"),
        ({"threads": True}, "threads must be an integer, or None, not True"),
        ({"tp": 65}, "tp must be from 1 to 64 ranks, not 65"),
        ({"page_size": 0}, "page_size must be an integer of at least 1, not 0"),
        ({"kv_bytes": -1}, "kv_bytes must be an integer of at least 0, or None, not -1"),
        ({"kv_host": -1}, "kv_host must be an integer of at least 0, or None, not -1"),
        ({"max_step_tokens": 0}, "max_step_tokens must be an integer of at least 1, not 0"),
        ({"itl_ms": 0}, "itl_ms must be a number above 0, or None, not 0"),
        ({"check": 1}, "check must be true or false, not 1"),
    ],
)
def test_what_is_refused_before_anything_is_fetched(
    arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(*_: Any, **__: Any) -> None:
        raise AssertionError("fetched")

    monkeypatch.setattr(open_engine, "open_checkpoint", fetch)
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        LLM("gemma3-270m", **arguments)
