"""The parts of benchmarks/quality.py: the figures are correct, and shuffling a model does not change its answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.shuffled import shuffled
from tests.models.test_against_transformers import all_logits
from tests.tiny import LATENT
from twostroke.api.llm import LLM
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.study.evaluate.wikipedia import PROSE, plain

IDS = [5, 9, 200, 17, 33, 5, 80, 81, 3, 44] * 4


def test_a_shuffled_model_gives_the_same_logits(
    family: str, tiny_llm: Callable[..., LLM], tiny_directory: Callable[[str], Path]
) -> None:
    if family in ("gemma4-moe", *LATENT):
        pytest.skip("the benchmark knows no channels of latents, nor of norms beside experts")
    checkpoint = open_checkpoint(str(tiny_directory(family)))
    other = shuffled(checkpoint)
    assert other.weights_id != checkpoint.weights_id
    options: dict[str, Any] = {"backend": "reference", "kv_bytes": 1 << 24, "threads": 1}
    expected, found = all_logits(tiny_llm(family), IDS), all_logits(LLM(other, **options), IDS)
    np.testing.assert_allclose(found, expected, atol=1e-3, rtol=0, equal_nan=False)


def test_wikitext_becomes_prose() -> None:
    text = """'''Ada''' was{{efn|{{lang|fr|a}} note}} a [[poetry|poet]]<ref name="a">[[b]]</ref> of [[London]].
{| class="x"
| [[Cell]]
|}
[[File:a.jpg|thumb|of [[Ada]]]]== Life ==
See [http://example.org her letters].<ref name="a" />"""
    assert plain(text).split("\n") == ["Ada was a poet of London.", "", "== Life ==", "See her letters."]
    paragraph = "Word " * 50 + "end."
    assert PROSE.findall(f"== Head ==\n{paragraph}\n* {paragraph}\nShort.") == [paragraph]
