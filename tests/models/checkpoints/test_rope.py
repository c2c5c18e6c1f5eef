"""Scaled RoPE, read from config.json and from GGUF files, against transformers' frequencies, factors and logits."""

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.models.checkpoints.test_gguf import HEAD_DIM, make_weights, write
from tests.models.test_against_transformers import all_logits, assert_close, tokens
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.errors import CheckpointError, UnsupportedArchitecture
from twostroke.kv import header_fields as header
from twostroke.models.checkpoints.gguf.opening import open_gguf
from twostroke.models.checkpoints.huggingface.config import read_config
from twostroke.models.config import ModelConfig
from twostroke.models.rope import Rope, frequencies, yarn_amplitude

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
SHORT, LONG = [1.0 + 0.01 * i for i in range(8)], [1.0 + 3.7 * i for i in range(8)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "yarn": YARN,
    "yarn-attention-factor": YARN | {"attention_factor": 0.7},
    "yarn-betas": YARN | {"beta_fast": 8, "beta_slow": 0.5},
    "yarn-zero-betas": YARN | {"beta_fast": 0, "beta_slow": None},
    "yarn-not-truncated": YARN | {"truncate": False},
    "yarn-deepseek": YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn-one-mscale": YARN | {"mscale": 0.707},
    "yarn-no-factor": YARN | {"factor": None},
    "yarn-small-factor": YARN | {"factor": 0.5},
    "yarn-one-pair": YARN | {"beta_fast": 2, "beta_slow": 1.99, "truncate": False},
    "yarn-gpt-oss": YARN | {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                            "rope_theta": 150000.0},
    "longrope-long": LONGROPE | {"original_max_position_embeddings": 512},
    "longrope-short": LONGROPE | {"original_max_position_embeddings": 2048},
    "longrope-factor": LONGROPE | {"original_max_position_embeddings": 512, "factor": 8.0},
    "longrope-attention-factor": LONGROPE | {"original_max_position_embeddings": 512, "attention_factor": 1.3},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}  # fmt: skip
SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
         "max_position_embeddings": 2048, "vocab_size": 48, "rms_norm_eps": 1e-6}  # fmt: skip


def described(folder: Path, **values: Any) -> ModelConfig:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **SIZES, **values}))
    return read_config(path, 100)


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling", "type"])
def test_frequencies_and_factors_are_those_of_transformers(kind: str, form: str, tmp_path: Path) -> None:
    parameters: dict[str, Any] = {"rope_theta": 5e4} | ROPES[kind]
    theirs = transformers.LlamaConfig(**SIZES, rope_parameters=dict(parameters))
    long = {"seq_len": 2048} if "longrope" in kind else {}
    expected, amplitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs, torch.device("cpu"), **long)
    if form == "rope_parameters":
        ours = described(tmp_path, rope_parameters=parameters)
    else:
        scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
        if form == "type":
            scaling["type"] = scaling.pop("rope_type")
        ours = described(tmp_path, rope_theta=parameters["rope_theta"], rope_scaling=scaling)
    rope = ours.ropes[0]
    np.testing.assert_allclose(frequencies(rope, 16), expected.numpy(), rtol=1e-6)
    assert rope.amplitude == pytest.approx(amplitude, rel=1e-12)


def test_the_context_outside_the_parameters_has_precedence(tmp_path: Path) -> None:
    """As Phi-3 states it."""
    outside = described(tmp_path, rope_scaling=LONGROPE, original_max_position_embeddings=512)
    assert outside == described(tmp_path, rope_scaling=LONGROPE | {"original_max_position_embeddings": 512})
    inside = LONGROPE | {"type": "su", "rope_type": "su", "original_max_position_embeddings": 1024}
    assert outside == described(tmp_path, rope_scaling=inside, original_max_position_embeddings=512)


def test_yarn_extends_a_context_that_a_config_states_unextended(tmp_path: Path) -> None:
    """Qwen 2.5's model card adds rope_scaling and leaves max_position_embeddings."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert described(tmp_path, rope_scaling=scaling).max_position == 8192
    assert described(tmp_path, rope_scaling=YARN | {"factor": 2.0}).max_position == 2048


def test_what_depends_on_a_sequences_length_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        described(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0})
    (line,) = caplog.messages
    assert "dynamic RoPE scaling starts behind the context of 2048" in line


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": ["yarn"]}, r"rope_type \['yarn'\] is not supported"),
        ({"rope_type": "yarn", "factor": "many"}, "factor must be a positive number; it is 'many'"),
        (YARN | {"original_max_position_embeddings": 1}, "original_max_position_embeddings must be greater than 1"),
        (YARN | {"attention_factor": 0}, "attention_factor must be a positive number"),
        (YARN | {"rope_theta": 1.0}, "rope_theta must be greater than 1"),
        (LONGROPE | {"long_factor": [1.0]}, "long_factor must be a list of 8 numbers"),
        (LONGROPE | {"short_factor": [0.0] * 8}, "short_factor must be a positive number"),
        (LONGROPE | {"short_factor": ["a"] * 8}, "short_factor must be a positive number"),
    ],
)
def test_bad_scalings_are_named(scaling: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        described(tmp_path, rope_scaling=scaling)


@pytest.mark.parametrize("rope", ["yarn", "yarn-deepseek", "yarn-attention-factor", "longrope-long", "dynamic"])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_logits_are_those_of_transformers(rope: str, backend: str, tmp_path: Path) -> None:
    parameters: dict[str, Any] = {"rope_theta": 1e4} | ROPES[rope]
    if "long_factor" in parameters:
        parameters |= {"short_factor": SHORT * 2, "long_factor": LONG * 2}
    directory = write_model("llama", tmp_path, rope_parameters=parameters, head_dim=32)  # native wants 32
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = tokens(600, 384, seed=7)  # past the original context
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0].numpy()
    stored = {"native": "bf16", "reference": "stored"}[backend]
    llm = LLM(str(directory), backend=backend, weights=stored, kv_bytes=16 << 20, threads=1)
    found = all_logits(llm, ids)
    if backend == "reference":
        assert_close(found, expected)
    assert np.linalg.norm(found - expected) < 0.1 * np.linalg.norm(expected)  # native: of weights in bfloat16


def scaled(**keys: Any) -> Callable[[gguf.GGUFWriter], None]:
    def alter(writer: gguf.GGUFWriter) -> None:
        for key, value in keys.items():
            name = f"llama.rope.{key.replace('__', '.')}"
            writer.add_string(name, value) if isinstance(value, str) else writer.add_float32(name, value)

    return alter


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"factor": 4.0, "original_context_length": 64.0}, {"factor": 4.0}),
        ({"factor": 4.0, "original_context_length": 64.0, "yarn_beta_fast": 8.0, "yarn_beta_slow": 0.5},
         {"factor": 4.0, "beta_fast": 8.0, "beta_slow": 0.5}),
        ({"factor": 40.0, "original_context_length": 64.0, "yarn_log_multiplier": 0.5},
         {"factor": 40.0, "attention_factor": yarn_amplitude(40.0, 1.0, 0.5)}),
        ({"factor": 4.0, "original_context_length": 64.0, "attn_factor": 0.5},
         {"factor": 4.0, "attention_factor": yarn_amplitude(4.0) * 0.5}),
    ],
)  # fmt: skip
def test_gguf_keys_mean_the_same(keys: dict[str, float], expected: dict[str, Any], tmp_path: Path) -> None:
    keys = {f"scaling__{key}": value for key, value in keys.items()}
    file = open_gguf(write(tmp_path / "a.gguf", alter=scaled(scaling__type="yarn", freq_base=2e4, **keys)))
    parameters = YARN | {"rope_theta": 2e4, "original_max_position_embeddings": 64} | expected
    ours = described(tmp_path, rope_parameters=parameters).ropes[0]
    assert HEAD_DIM == 16
    np.testing.assert_allclose(frequencies(file.config.ropes[0], 16), frequencies(ours, 16), rtol=1e-6)
    assert file.config.ropes[0].amplitude == pytest.approx(ours.amplitude, rel=1e-6)


def test_gguf_linear_and_none(tmp_path: Path) -> None:
    def factors(**keys: Any) -> tuple[float, ...] | None:
        return open_gguf(write(tmp_path / "a.gguf", alter=scaled(**keys))).config.ropes[0].factors

    assert factors(scaling__type="linear", scaling__factor=4.0) == (4.0,) * 8
    assert factors(scaling__factor=4.0) == (4.0,) * 8  # llama.cpp's type where none is stated
    assert factors(scale_linear=2.0) == (2.0,) * 8
    assert factors(scaling__type="none", scaling__factor=4.0) is None
    with pytest.raises(UnsupportedArchitecture, match="RoPE scaling 'other'"):
        factors(scaling__type="other")
    assert factors(scaling__type="yarn", scaling__factor=4.0, scaling__yarn_ext_factor=0.0) == (4.0,) * 8


def test_gguf_longrope_and_factors(tmp_path: Path) -> None:
    lists = {"rope_factors_short.weight": np.array(SHORT, "f"), "rope_factors_long.weight": np.array(LONG, "f")}
    weights = make_weights("llama") | lists
    alter = scaled(scaling__original_context_length=64.0, scaling__attn_factor=1.25)
    rope = open_gguf(write(tmp_path / "a.gguf", weights=weights, alter=alter)).config.ropes[0]
    assert rope.factors is not None
    assert np.allclose(rope.factors, LONG, rtol=1e-6)
    assert rope.amplitude == 1.25
    rope = open_gguf(write(tmp_path / "b.gguf", weights=weights)).config.ropes[0]
    assert rope.factors is not None
    assert np.allclose(rope.factors, SHORT, rtol=1e-6)
    freqs = make_weights("llama") | {"rope_freqs.weight": np.full(8, 2, "f")}
    alter = scaled(scaling__type="linear", scaling__factor=4.0)
    assert open_gguf(write(tmp_path / "c.gguf", weights=freqs, alter=alter)).config.ropes[0].factors == (8.0,) * 8


def test_a_saved_value_keeps_its_rope() -> None:
    """Files from before the amplitude have none."""
    rope = Rope(1e4, (1.5, 2.25), 1.1386294361119891)
    fields = json.loads(json.dumps(dataclasses.asdict(rope)))
    del fields["short"]  # no value has it
    assert header.rope_from_fields(fields) == rope
    del fields["amplitude"]
    assert header.rope_from_fields(fields) == Rope(1e4, (1.5, 2.25))
