"""LongRoPE: an engine has the list for its longest sequence, as vLLM has, and agrees with transformers there.

transformers changes lists when a sequence grows past the original context, and computes all its keys again.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.checkpoints.test_families_in_gguf import CONVERTED, convert
from tests.models.test_against_transformers import all_logits, assert_close, expected_logits, tokens
from tests.tiny import VOCAB, write_model
from twostroke.api.llm import LLM
from twostroke.errors import ContextLengthExceeded, InvalidRequest
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.gguf.opening import open_gguf
from twostroke.models.checkpoints.huggingface.directory import open_huggingface

ORIGINAL, CONTEXT = 128, 1024
ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
SIZES: dict[str, dict[str, Any]] = {
    "Phi-4-mini": {},  # a part of a head, ones as short factors, tied, a window as large as twice the context
    "Phi-3.5": {"whole": True, "tie_word_embeddings": False},
}


@pytest.fixture(scope="module", params=SIZES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = dict(SIZES[request.param])
    whole = changes.pop("whole", False)
    rope = ROPE | (
        {"short_factor": [1.1 + 0.2 * i for i in range(16)], "long_factor": [1.5 + i for i in range(16)]}
        if whole
        else {"short_factor": [1.0] * 12, "long_factor": [2.0 + i for i in range(12)]}
    )
    sizes = {"tie_word_embeddings": True, "sliding_window": 2 * CONTEXT} | changes
    sizes |= {"rope_parameters": rope | ({"partial_rotary_factor": 1.0} if whole else {})}
    sizes |= {"max_position_embeddings": CONTEXT, "original_max_position_embeddings": ORIGINAL}
    return write_model("phi3", tmp_path_factory.mktemp("longrope"), **sizes)


@pytest.fixture(scope="module", params=["directory", "GGUF"])
def checkpoint(request: pytest.FixtureRequest, directory: Path) -> Checkpoint:
    opened = open_huggingface(directory)
    if request.param == "directory":
        return opened

    def metadata(writer: Any, values: dict[str, Any]) -> None:
        rope = values["rope_parameters"]
        writer.add_rope_dimension_count(2 * len(rope["short_factor"]))
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(CONTEXT / ORIGINAL) / np.log(ORIGINAL))))
        writer.add_rope_scaling_orig_ctx_len(ORIGINAL)
        for which in ("long", "short"):
            writer.add_tensor(f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], np.float32))

    path = convert(directory, directory / "model.gguf", replace(CONVERTED["phi3"], metadata=metadata))
    return replace(open_gguf(path), tokenizer_source=opened.tokenizer_source)


def opened(checkpoint: Checkpoint, **options: Any) -> LLM:
    return LLM(checkpoint, backend="reference", kv_bytes=16 << 20, threads=1, **options)


def test_both_lists_are_those_of_transformers(checkpoint: Checkpoint, directory: Path) -> None:
    short, long = tokens(ORIGINAL, VOCAB, seed=1), tokens(400, VOCAB, seed=2)
    within, beyond = expected_logits(directory, short), expected_logits(directory, long)
    limited, whole = opened(checkpoint, max_model_len=ORIGINAL), opened(checkpoint)
    assert_close(all_logits(limited, short), within)
    assert_close(all_logits(whole, long), beyond)
    assert np.abs(all_logits(whole, short) - within).max() > 0.01, "the lists differ"
    just_more = opened(checkpoint, max_model_len=ORIGINAL + 1)
    np.testing.assert_array_equal(all_logits(just_more, short), all_logits(whole, short))
    assert (limited.max_model_len, just_more.max_model_len, whole.max_model_len) == (ORIGINAL, ORIGINAL + 1, CONTEXT)


def test_nothing_changes_when_a_sequence_grows(checkpoint: Checkpoint) -> None:
    """Keys in a cache stay: a prefix that is found again, and grows past the original context, has the same logits."""
    ids = tokens(400, VOCAB, seed=3)
    whole = all_logits(opened(checkpoint), ids)
    llm = opened(checkpoint)
    kv = llm.prefill(ids[350:], after=llm.prefill(ids[100:350], after=llm.prefill(ids[:100])))
    made = next(llm.decode(kv, max_tokens=1, logprobs=0))
    last = whole[-1].astype(np.float64)
    assert made.id == last.argmax()
    assert made.logprob == pytest.approx(last.max() - np.log(np.exp(last).sum()), abs=1e-4)


def test_identities(checkpoint: Checkpoint) -> None:
    """Entries of both lists are kept apart, and those of one list are shared by engines of every length."""
    shorter, short, long, whole = (
        checkpoint.limited(length).weights_id for length in (ORIGINAL // 2, ORIGINAL, ORIGINAL + 1, None)
    )
    assert shorter == short != long == whole == checkpoint.weights_id


def test_companions_have_the_same_list(checkpoint: Checkpoint) -> None:
    llm = opened(checkpoint, max_model_len=ORIGINAL, student=checkpoint, draft=checkpoint)
    assert {model.id for model in llm.engine.models.values()} == {llm.model.id}


def test_the_list_is_said(checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        opened(checkpoint, max_model_len=ORIGINAL)
        assert not caplog.messages
        opened(checkpoint)
    (line,) = caplog.messages
    assert f"a max_model_len of {ORIGINAL} or less takes the short ones" in line


def test_limits(tiny_directory: Callable[[str], Path]) -> None:
    """Of any model: no prompt is longer, answers end there, and wrong lengths are refused in a line."""
    checkpoint = open_huggingface(tiny_directory("llama"))
    context = checkpoint.config.max_position
    llm = opened(checkpoint, max_model_len=20)
    made = list(llm.decode(llm.prefill(tokens(15, VOCAB, seed=1)), max_tokens=50, ignore_eos=True))
    assert (len(made), made[-1].finish_reason) == (5, "length")
    with pytest.raises(ContextLengthExceeded, match="at most 19 leave room"):
        llm.generate([tokens(20, VOCAB, seed=1)], max_tokens=1)
    assert opened(checkpoint, max_model_len=context).max_model_len == context
    with pytest.raises(InvalidRequest, match=f"max_model_len must be at most {context}, the context of model"):
        opened(checkpoint, max_model_len=context + 1)
    for wrong in (0, 1, -1, True, 2.5, "many"):
        with pytest.raises(InvalidRequest, match="max_model_len must be"):
            opened(checkpoint, max_model_len=wrong)
