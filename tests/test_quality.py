"""The parts of benchmarks/quality.py: what is compared is right, and shuffling a model changes nothing."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.quality import compare, interval
from benchmarks.shuffled import shuffled
from tests.models.test_against_transformers import all_logits
from twostroke.checkpoints.resolve import open_checkpoint
from twostroke.evals.wikipedia import PROSE, plain
from twostroke.llm import LLM

IDS = [5, 9, 200, 17, 33, 5, 80, 81, 3, 44] * 4


def test_a_shuffled_model_gives_the_same_logits(
    family: str, tiny_llm: Callable[..., LLM], tiny_directory: Callable[[str], Path]
) -> None:
    checkpoint = open_checkpoint(str(tiny_directory(family)))
    other = shuffled(checkpoint)
    assert other.weights_id != checkpoint.weights_id
    expected, found = all_logits(tiny_llm(family), IDS), all_logits(LLM(other, kv_bytes=1 << 24, threads=1), IDS)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_comparison_of_two_distributions() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]), torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]])
    surprise, kl, same = compare(p.log() + 3, q.log() - 2, [0, 2])
    assert surprise == pytest.approx([np.log(4), -np.log(0.8)], rel=1e-6)
    assert kl == pytest.approx([0.25 * np.log(2), 0], abs=1e-7)
    assert same.tolist() == [0, 1]


def test_intervals_hold_the_mean_and_shrink() -> None:
    values = np.random.default_rng(0).standard_normal(400) + 5
    (low, high), (low_of_few, high_of_few) = interval(values), interval(values[:25])
    assert low < 5 < high
    assert high - low < 0.5 * (high_of_few - low_of_few)


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
