"""Mixtures of experts: both loaders, both CPU backends, all formats of files."""

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.models.test_against_transformers import all_logits, tokens
from tests.tiny import VOCAB, write_model
from tests.watching import answers
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.errors import CheckpointError
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.gguf.config import tensor_names
from twostroke.models.checkpoints.gguf.opening import open_gguf
from twostroke.models.checkpoints.huggingface.directory import open_huggingface
from twostroke.models.config import Experts
from twostroke.sampling.params import SamplingParams

WHY_NOT = library.unavailable()
needs_native = pytest.mark.skipif(WHY_NOT is not None, reason=f"no native backend: {WHY_NOT}")
VARIANTS = library.variants() if WHY_NOT is None else ()

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "head_dim": 64,
    "rms_norm_eps": 2.0**-20,  # the same in float32, as GGUF files have it
}
FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "BF16")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts in every layer, as GGUF files have them."""
    return write_model("qwen3moe", tmp_path_factory.mktemp("qwen3moe"), **SIZES, mlp_only_layers=[])


def write_gguf(source: Checkpoint, path: Path, quantized: str) -> Path:
    """The same model as a GGUF file: experts of a layer in one tensor, matrices of whole blocks in a format."""
    config, experts = source.config, source.config.layers[0].feed_forward
    assert isinstance(experts, Experts)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(999)  # of dense layers, of which there are none
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.ropes[0].base)
    writer.add_expert_count(experts.count)
    writer.add_expert_used_count(experts.chosen)
    writer.add_expert_feed_forward_length(experts.intermediate_size)
    parts: dict[str, list[np.ndarray]] = {}
    for ours, theirs in tensor_names(config).items():
        parts.setdefault(theirs.tensor, []).append(source.tensor(ours).dequantize())
    for name, found in parts.items():
        values = np.stack(found) if "_exps." in name else found[0]
        plain = values.ndim == 1 or "ffn_gate_inp" in name
        kind = gguf.GGMLQuantizationType["F32" if plain else quantized]
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantize(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Quantizes with the package; K formats, which it only decodes, get random bits with scales of the right size."""
    if not kind.name.endswith("_K"):
        return gguf.quantize(values, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(values.size)
    raw = random.integers(0, 256, (*values.shape[:-1], values.shape[-1] // block * size), np.uint8)
    blocks = raw.reshape(-1, size)
    scale = np.full(len(blocks), np.float16(values.std() / {"Q4_K": 300, "Q5_K": 600, "Q6_K": 1400}[kind.name]))
    if kind.name == "Q6_K":
        blocks[:, 208:] = scale[:, None].view(np.uint8)
    else:
        blocks[:, :2] = scale[:, None].view(np.uint8)
        blocks[:, 2:4] = (scale * np.float16(8 if kind.name == "Q4_K" else 16))[:, None].view(np.uint8)
    return raw


@pytest.fixture(scope="module")
def from_gguf(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    folder = tmp_path_factory.mktemp("gguf")

    @functools.cache
    def opened(format: str) -> Checkpoint:
        source = open_huggingface(directory)
        path = write_gguf(source, folder / f"{format}.gguf", format)
        return replace(open_gguf(path), tokenizer_source=source.tokenizer_source)

    return opened


def test_both_loaders_read_one_model(directory: Path, from_gguf: Callable[[str], Checkpoint]) -> None:
    theirs, mine = open_huggingface(directory), from_gguf("F32")
    assert mine.config == replace(theirs.config, tied=False)
    for name in theirs.names():
        assert np.array_equal(mine.tensor(name).dequantize(), theirs.tensor(name).dequantize()), name
    models = [LLM(checkpoint, backend="reference", kv_bytes=16 << 20) for checkpoint in (theirs, mine)]
    ids = tokens(50, VOCAB, seed=0)
    expected, found = (all_logits(llm, ids) for llm in models)
    assert np.array_equal(found, expected)


def test_a_part_that_is_missing_is_named(directory: Path, tmp_path: Path) -> None:
    """A file whose experts are fewer than its metadata say."""
    source = open_huggingface(directory)
    layers = [replace(layer, feed_forward=replace(layer.feed_forward, count=7)) for layer in source.config.layers]
    fewer = replace(source.config, layers=tuple(layers))
    stored = {name: tensor for name, tensor in source.stored.items() if ".experts.7." not in name}
    stored |= {name: tensor.rows(0, 7) for name, tensor in stored.items() if name.endswith(".router")}
    path = write_gguf(replace(source, config=fewer, stored=stored), tmp_path / "a.gguf", "F32")
    data = path.read_bytes()
    key = b"qwen3moe.expert_count"
    place = data.index(key) + len(key) + 4
    path.write_bytes(data[:place] + (8).to_bytes(4, "little") + data[place + 4 :])
    with pytest.raises(CheckpointError, match=r"_exps\.weight: shape \(7, 256, 256\) where there are 8 experts"):
        open_gguf(path)


@pytest.fixture(scope="module")
def expected_logits(from_gguf: Callable[[str], Checkpoint]) -> Callable[[str, int], np.ndarray]:
    """The reference's logits of random tokens, with weights in a format."""

    @functools.cache
    def reference(format: str) -> LLM:
        return LLM(from_gguf(format), backend="reference", kv_bytes=16 << 20)

    return functools.cache(lambda format, count: all_logits(reference(format), tokens(count, VOCAB, seed=count)))


@needs_native
@pytest.mark.thinned
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("format", FORMATS)
def test_native_is_near_the_reference(
    format: str,
    variant: str,
    from_gguf: Callable[[str], Checkpoint],
    expected_logits: Callable[[str, int], np.ndarray],
) -> None:
    """With the same weights in float32, for one row, some and many: only the rounding of activations differs."""
    native = LLM(from_gguf(format), backend=f"native-{variant}", kv_bytes=16 << 20)
    for count in (1, 17, 600):
        expected, found = expected_logits(format, count), all_logits(native, tokens(count, VOCAB, seed=count))
        # A row with nearly equal router logits may choose another expert, and then differs completely.
        off = np.abs(found - expected).max(-1) / np.abs(expected).max(-1)
        assert np.median(off) < 0.15


@needs_native
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_bits_under_every_schedule(variant: str, directory: Path) -> None:
    """Alone and cold; in chunks, batched, prefix-hit and preempted, with any number of threads."""
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=3, ignore_eos=True, logprobs=2)
    prompts = [tokens(count, VOCAB, seed=count % 3) for count in (1, 17, 40, 70, 40)]

    def run(threads: int, chunk: int, pages: int, index: str, together: bool) -> list[object]:
        page_bytes = 3 * 2 * 2 * 64 * 2 * 16
        llm = LLM(
            str(directory),
            backend=f"native-{variant}",
            weights="int8",
            threads=threads,
            kv_bytes=pages * page_bytes,
            prefix_index=index,
        )
        config = SchedulerConfig(max_step_tokens=chunk)
        requests = [llm.request(prompt, params) for prompt in prompts]
        if together:
            return list(answers(llm, requests, config))
        return [answers(llm, [request], config)[0] for request in requests]

    alone = run(2, 4096, 256, "off", together=False)
    assert run(1, 7, 256, "radix", together=True) == alone
    assert run(3, 16, 14, "radix", together=True) == alone
    assert run(2, 512, 256, "radix", together=False) == alone


def test_a_router_keeps_its_bits(directory: Path) -> None:
    """Matrices are re-encoded on load; a router is not, since a wrong choice of experts costs much."""
    from twostroke.models.checkpoints.quantize import quantize as re_encoded

    checkpoint = re_encoded(open_huggingface(directory), "int4")
    assert checkpoint.tensor("layers.0.router").format == "F32"
    assert checkpoint.tensor("layers.0.experts.3.up").format == "Q4_1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": 65535}, "experts of 589815 matrices, and the files have"),
        ({"num_local_experts": 1 << 40}, "num_local_experts must be a positive integer"),
        ({"num_local_experts": 9}, "experts of|is missing"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most the 8 experts; it is 9"),
        ({"norm_topk_prob": "false"}, "norm_topk_prob must be true or false"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers must be a list of layers, from 0 to 2"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be a positive integer"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10**400}}, "rope_theta must be a positive number"),
    ],
)
def test_bad_configs_are_one_clear_error(
    changes: dict[str, Any], message: str, directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(directory, tmp_path / "a")
    config = tmp_path / "a" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        open_huggingface(tmp_path / "a")
