"""The GGUF reader on small files made with the `gguf` package, whole and damaged."""

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twostroke.errors import CheckpointError, UnsupportedArchitecture
from twostroke.models.checkpoints.checkpoint import Checkpoint, GgufTokenizerSource
from twostroke.models.checkpoints.gguf.file import read_gguf
from twostroke.models.checkpoints.gguf.opening import open_gguf
from twostroke.models.config import GatedMLP
from twostroke.models.tensor_shapes import tensor_shapes

HIDDEN, FFN, VOCAB, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 40, 2, 4, 2, 16
Weights = dict[str, np.ndarray]


def make_weights(arch: str, tied: bool = False, layers: int = LAYERS) -> Weights:
    """Random weights under GGUF names, in the plain (half-split) layout."""
    rng = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for i in range(layers):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }
        if arch in ("qwen3", "gemma3"):
            layer |= {"attn_q_norm": (HEAD_DIM,), "attn_k_norm": (HEAD_DIM,)}
        if arch == "gemma3":
            layer |= {"post_attention_norm": (HIDDEN,), "post_ffw_norm": (HIDDEN,)}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
        if arch == "qwen2":
            sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
            shapes |= {f"blk.{i}.attn_{part}.bias": (size,) for part, size in sizes.items()}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def interleaved(weights: np.ndarray, heads: int) -> np.ndarray:
    """The llama converter's permutation of Q and K."""
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weights.shape)


def write(
    path: Path,
    arch: str = "llama",
    weights: Weights | None = None,
    formats: Callable[[str], str] = lambda name: "F32",
    alter: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    layers: int = LAYERS,
    heads: int = HEADS,
    split_tensors: int = 0,
) -> Path:
    weights = make_weights(arch) if weights is None else weights
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split_tensors)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(heads)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"tökén{i}" for i in range(VOCAB)])
    writer.add_token_merges(["t ö", "k é"])
    writer.add_token_scores([float(i) for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_bos_token_id(3)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}")
    writer.add_array("general.tags", ["a", "b"])
    writer.add_array("general.numbers", [1, 2])
    writer.add_license("mit")
    alter(writer)
    for name, values in weights.items():
        if arch == "llama" and ("attn_q." in name or "attn_k." in name):
            values = interleaved(values, HEADS if "attn_q" in name else KV_HEADS)
        kind = gguf.GGMLQuantizationType[formats(name) if values.ndim == 2 else "F32"]
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    found = checkpoint.tensor(name).dequantize()
    assert found.dtype == np.float32
    return found


def test_llama_rows_of_q_and_k_are_put_back(tmp_path: Path) -> None:
    weights = make_weights("llama")
    checkpoint = open_gguf(write(tmp_path / "a.gguf", weights=weights))
    assert checkpoint.names() == set(tensor_shapes(checkpoint.config))
    for i in range(LAYERS):
        for ours, theirs in {
            "q": "attn_q",
            "k": "attn_k",
            "v": "attn_v",
            "o": "attn_output",
            "down": "ffn_down",
        }.items():
            found = values(checkpoint, f"layers.{i}.{ours}")
            assert np.array_equal(found, weights[f"blk.{i}.{theirs}.weight"])
    assert np.array_equal(values(checkpoint, "head"), weights["output.weight"])
    assert (checkpoint.name, checkpoint.licence) == ("a", "mit")
    assert not checkpoint.config.tied
    assert checkpoint.config.layers[0].attention.scale == HEAD_DIM**-0.5
    assert checkpoint.config.ropes[0].base == 1e4
    assert checkpoint.config.ropes[0].factors is None


def test_biases_of_llama_are_read(tmp_path: Path) -> None:
    weights = make_weights("llama")
    rng = np.random.default_rng(0)
    sizes = {name: len(weights[f"blk.0.{name}.weight"]) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    own = [f"blk.{i}.{name}.bias" for i in range(LAYERS) for name in sizes]
    biased = weights | {name: rng.standard_normal(sizes[name.split(".")[2]]).astype(np.float32) for name in own}
    checkpoint = open_gguf(write(tmp_path / "all.gguf", weights=biased))
    attention, mlp = checkpoint.config.layers[0].attention, checkpoint.config.layers[0].feed_forward
    assert (attention.bias, attention.output_bias, mlp) == (True, True, GatedMLP(FFN))
    for ours, theirs in {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}.items():
        assert np.array_equal(values(checkpoint, f"layers.1.{ours}_bias"), biased[f"blk.1.{theirs}.bias"])
    some = {name: array for name, array in biased.items() if "output.bias" not in name}
    attention = open_gguf(write(tmp_path / "qkv.gguf", weights=some)).config.layers[0].attention
    assert (attention.bias, attention.output_bias) == (True, False)
    del some["blk.0.attn_k.bias"]
    with pytest.raises(UnsupportedArchitecture, match=r"the tensor blk\.0\.attn_q\.bias"):
        open_gguf(write(tmp_path / "some.gguf", weights=some))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_1", "Q4_0"])
def test_permuting_quantized_rows_loses_nothing(tmp_path: Path, kind: str) -> None:
    weights = make_weights("llama")
    checkpoint = open_gguf(write(tmp_path / "a.gguf", weights=weights, formats=lambda name: kind))
    number = gguf.GGMLQuantizationType[kind]
    for ours, theirs in {"layers.1.q": "blk.1.attn_q.weight", "layers.0.k": "blk.0.attn_k.weight"}.items():
        expected = gguf.dequantize(gguf.quantize(weights[theirs], number), number)
        assert np.array_equal(values(checkpoint, ours), expected.reshape(weights[theirs].shape))
        assert checkpoint.tensor(ours).format == kind


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "gemma3"])
def test_other_architectures_are_taken_as_they_are(tmp_path: Path, arch: str) -> None:
    weights = make_weights(arch, tied=True)

    def alter(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_freq_base(1e6)
        if arch == "gemma3":
            writer.add_sliding_window(32)

    checkpoint = open_gguf(write(tmp_path / "a.gguf", arch, weights, alter=alter))
    config = checkpoint.config
    assert np.array_equal(values(checkpoint, "layers.1.q"), weights["blk.1.attn_q.weight"])
    assert config.tied
    assert config.layers[0].attention.bias == (arch == "qwen2")
    assert config.layers[0].attention.qk_norm == (arch != "qwen2")
    assert config.layers[0].post_norms == (arch == "gemma3")
    if arch == "qwen2":
        assert np.array_equal(values(checkpoint, "layers.0.k_bias"), weights["blk.0.attn_k.bias"])
        assert config.windows == (None, None)
    if arch == "gemma3":
        found = values(checkpoint, "layers.0.attn_post_norm")
        assert np.array_equal(found, weights["blk.0.post_attention_norm.weight"])
        assert config.windows == (32, 32)
        assert [rope.base for rope in config.ropes] == [1e4, 1e4]
        assert (config.layers[0].feed_forward.activation, config.embedding_scale) == ("gelu_tanh", 8.0)


def test_gemma_s_sixth_layer_is_global_and_alone_scaled(tmp_path: Path) -> None:
    def alter(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_freq_base(1e6)
        writer.add_sliding_window(32)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    weights = make_weights("gemma3", layers=7)
    config = open_gguf(write(tmp_path / "a.gguf", "gemma3", weights, alter=alter, layers=7)).config
    assert config.windows == (32, 32, 32, 32, 32, None, 32)
    assert config.ropes[4].base == 1e4
    assert config.ropes[4].factors is None
    assert config.ropes[5].base == 1e6
    assert config.ropes[5].factors == (8.0,) * (HEAD_DIM // 2)


def test_mistral_windows_and_llama3_factors(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    weights = make_weights("llama") | {"rope_freqs.weight": factors}
    config = open_gguf(write(tmp_path / "a.gguf", weights=weights, alter=lambda w: w.add_sliding_window(16))).config
    assert config.windows == (16, 16)
    assert config.ropes[0].factors == tuple(factors.tolist())


def test_head_dim_may_be_stated(tmp_path: Path) -> None:
    weights = make_weights("qwen3")
    path = write(tmp_path / "a.gguf", "qwen3", weights, alter=lambda w: (w.add_key_length(32), w.add_value_length(32)))
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight: shape \(64, 64\) where layers\.0\.q must"):
        open_gguf(path)


def test_metadata_come_as_plain_values(tmp_path: Path) -> None:
    source = open_gguf(write(tmp_path / "a.gguf")).tokenizer_source
    assert isinstance(source, GgufTokenizerSource)
    metadata = source.metadata
    tokens, expected = metadata["tokenizer.ggml.tokens"], [f"tökén{i}" for i in range(VOCAB)]
    assert list(tokens) == expected
    assert len(tokens) == VOCAB
    assert [tokens[i] for i in range(-VOCAB, VOCAB)] == expected * 2
    assert tokens[3:9:2] == expected[3:9:2]
    assert list(metadata["tokenizer.ggml.merges"]) == ["t ö", "k é"]
    assert metadata["tokenizer.ggml.scores"].dtype == np.float32
    assert metadata["tokenizer.ggml.token_type"].dtype == np.int32
    assert metadata["tokenizer.ggml.bos_token_id"] == 3
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert metadata["tokenizer.chat_template"] == "{{ messages }}"
    assert metadata["general.tags"] == ["a", "b"]
    assert metadata["general.numbers"] == [1, 2]


def test_the_id_names_the_weights_and_not_the_place(tmp_path: Path) -> None:
    first = write(tmp_path / "a.gguf")
    (tmp_path / "elsewhere").mkdir()
    moved = Path(shutil.copy(first, tmp_path / "elsewhere" / "b.gguf"))
    assert open_gguf(first).weights_id == open_gguf(moved).weights_id
    other = make_weights("llama")
    other["blk.1.ffn_norm.weight"][5] += 1
    changed = write(tmp_path / "c.gguf", weights=other)
    requantized = write(tmp_path / "d.gguf", formats=lambda name: "Q8_0")
    assert len({open_gguf(path).weights_id for path in (first, changed, requantized)}) == 3


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("qwen2.expert_count", 8, "architecture qwen2 with 8 experts"),
        ("llama.rope.scaling.type", "other", "RoPE scaling 'other'"),
        ("llama.rope.dimension_count", 8, "RoPE on a part"),
        ("llama.attention.value_length", 8, "values of another size"),
        ("llama.final_logit_softcapping", 30, "capped logits"),
    ],
)
def test_variants_we_lack_are_refused(tmp_path: Path, key: str, value: Any, message: str) -> None:
    def alter(writer: gguf.GGUFWriter) -> None:
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)

    path = write(tmp_path / "a.gguf", key.split(".")[0], alter=alter)
    with pytest.raises(UnsupportedArchitecture, match=message) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)


def test_unknown_architectures_and_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedArchitecture, match=r"a\.gguf: architecture 'mamba' is not supported"):
        open_gguf(write(tmp_path / "a.gguf", "mamba"))
    weights = make_weights("llama") | {"blk.0.attn_q.bias": np.zeros(64, np.float32)}
    with pytest.raises(UnsupportedArchitecture, match=r"the tensor blk\.0\.attn_q\.bias"):
        open_gguf(write(tmp_path / "b.gguf", weights=weights))


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    weights = make_weights("llama")
    del weights["blk.1.ffn_up.weight"]
    with pytest.raises(CheckpointError, match=r"a\.gguf: the tensor blk\.1\.ffn_up\.weight is missing"):
        open_gguf(write(tmp_path / "a.gguf", weights=weights))
    weights = make_weights("llama")
    weights["blk.1.ffn_up.weight"] = weights["blk.1.ffn_up.weight"][:-1]
    with pytest.raises(CheckpointError, match=r"b\.gguf: blk\.1\.ffn_up\.weight: shape \(95, 64\)"):
        open_gguf(write(tmp_path / "b.gguf", weights=weights))
    with pytest.raises(CheckpointError, match=r"there is no tensor layers\.9\.q"):
        open_gguf(write(tmp_path / "c.gguf")).tensor("layers.9.q")
    with pytest.raises(CheckpointError, match=r"d\.gguf: 5 heads"):
        open_gguf(write(tmp_path / "d.gguf", heads=5))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "cannot be read"),
        (lambda data: b"GGML" + data[4:], "not a GGUF file"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "GGUF version 1 is not supported"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "version 50331648 is not supported"),
        (lambda data: data[:6], "damaged or truncated"),
        (
            lambda data: data[:16] + struct.pack("<Q", 1 << 60) + data[24:],
            "damaged or truncated|there twice|no metadata",
        ),
        (lambda data: data[:24] + struct.pack("<Q", 1 << 63) + data[32:], "damaged or truncated"),
        (lambda data: data[:-1000], "truncated: data end"),
        (lambda data: data[:2000], "damaged or truncated"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(damage(write(path).read_bytes()))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unsupported_tensor_types_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", formats=lambda name: "F16" if name == "output.weight" else "F32")
    data = path.read_bytes()
    description = b"output.weight" + struct.pack("<IQQI", 2, HIDDEN, VOCAB, 1)
    assert description in data
    path.write_bytes(data.replace(description, description[:-4] + struct.pack("<I", 9)))
    with pytest.raises(CheckpointError, match=r"'output\.weight': tensor type Q8_1 is not supported, only F32"):
        open_gguf(path)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int]:
    """A scratch path, a whole file's bytes, and where its tensor data begin."""
    folder = tmp_path_factory.mktemp("damaged")
    whole = write(folder / "whole.gguf", "gemma3", alter=lambda w: w.add_sliding_window(8))
    data = whole.read_bytes()
    sizes = sum(tensor.nbytes for tensor in read_gguf(whole).tensors.values())
    return folder / "damaged.gguf", data, len(data) - sizes


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data())
def test_damaged_files_open_or_raise_checkpoint_error(small_file: tuple[Path, bytes, int], draw: st.DataObject) -> None:
    path, data, header = small_file
    changed = bytearray(data)
    for _ in range(draw.draw(st.integers(0, 3))):
        changed[draw.draw(st.integers(0, header))] = draw.draw(st.integers(0, 255))
    length = draw.draw(st.one_of(st.just(len(data)), st.integers(0, header), st.integers(0, len(data))))
    path.write_bytes(changed[:length])
    try:
        checkpoint = open_gguf(path)
    except CheckpointError as error:
        message = str(error)
    else:
        assert set(tensor_shapes(checkpoint.config)) == checkpoint.names()
        message = checkpoint.weights_id
    assert message
    assert "\n" not in message
