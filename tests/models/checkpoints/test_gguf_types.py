"""GGUF files with matrices of every type: exact on the reference, on the native backend as the log says."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.linalg import norm

from tests.models.formats.blocks import random_blocks
from tests.models.test_against_transformers import all_logits
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.backends.native.weights import FORMATS as KERNELS
from twostroke.errors import CheckpointError
from twostroke.models.checkpoints.gguf.file import read_gguf
from twostroke.models.checkpoints.gguf.opening import open_gguf
from twostroke.models.checkpoints.quantize import fitted, quantize
from twostroke.models.formats.blocks import FORMATS
from twostroke.models.formats.transcode import SUBSTITUTES

HIDDEN, FFN, VOCAB, LAYERS, HEADS, KV_HEADS = 256, 512, 64, 2, 8, 4
IDS = [5, 9, 20, 17, 33, 5, 60, 41]
# Numbers of any size are no weights; and their matrices would be written as they are read, in whole numbers.
WEIGHTS = sorted(set(FORMATS) - {"I8", "I16", "I32", "I64"})
native = pytest.mark.skipif(library.unavailable() is not None, reason="no native backend")


def write(path: Path, name: str, vectors: str = "F32", scale: float | None = None) -> Path:
    """A random model all of whose matrices are of one type; norms are of the type `vectors`."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        kv = KV_HEADS * HIDDEN // HEADS
        matrices = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN),
                    "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN),
                    "ffn_down": (HIDDEN, FFN), "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}  # fmt: skip
        shapes |= {f"blk.{i}.{part}.weight": shape for part, shape in matrices.items()}
    shapes["output_norm.weight"] = (HIDDEN,)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(chr(ord("!") + i) for i in range(VOCAB - 1)), "AB"])
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_merges(["A B"])
    writer.add_token_types([1] * VOCAB)
    writer.add_eos_token_id(3)
    for seed, (tensor, shape) in enumerate(shapes.items()):
        kind = name if len(shape) == 2 else vectors
        if len(shape) == 1:
            data = np.ones(shape, {"F32": "<f4", "F16": "<f2", "F64": "<f8"}[vectors])
        else:
            blocks = random_blocks(name, shape[0] * shape[1] // FORMATS[name].block_size, seed)
            values = FORMATS[name].decode(blocks)
            blocks = random_blocks(name, len(blocks), seed, size=0.01 * 0.04 / float(values.std()))
            data = blocks.reshape(shape[0], -1)
            if FORMATS[name].block_size == 1 and name != "BF16":
                data = data.view({"F32": "<f4", "F16": "<f2", "F64": "<f8"}[name])
        writer.add_tensor(tensor, data, raw_dtype=gguf.GGMLQuantizationType[kind])
        if scale is not None and len(shape) == 2:
            writer.add_tensor(tensor.replace(".weight", ".scale"), np.array([scale], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_reference_has_the_values_of_the_file(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", name)
    checkpoint, file = open_gguf(path), read_gguf(path)
    tensor = file.tensors["blk.1.ffn_down.weight"]
    assert (tensor.format, tensor.shape) == (name, (HIDDEN, FFN))
    if name not in ("F32", "F16", "F64", "Q8_K", "Q1_0"):
        expected = gguf.dequantize(np.array(tensor.data), gguf.GGMLQuantizationType[name])
        assert np.array_equal(checkpoint.tensor("layers.1.down").dequantize(), expected)
    assert checkpoint.matrices()["layers.1.down"].format == name
    assert not checkpoint.encoders


@native
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_native_backend_computes_nearly_the_same(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(write(tmp_path / "a.gguf", name))
    exact = all_logits(LLM(path, backend="reference", kv_bytes=8 << 20, threads=1), IDS)
    llm = LLM(path, kv_bytes=8 << 20, threads=1)
    assert llm.backend.name == "native"
    near = SUBSTITUTES.get(name)
    # Activations are rounded to 8 bits: 2% without any change of weights.
    assert norm(all_logits(llm, IDS) - exact) < (0.04 + 4 * (near.error if near else 0)) * norm(exact)
    if near is None:
        assert not caplog.messages
        return
    (line,) = caplog.messages
    change = f"changed by {100 * near.error:.3g}%" if near.error else "exactly"
    assert f"{name} as {near.format} ({change}), " in line
    assert "\n" not in line


@native
def test_exact_stand_ins_make_the_very_logits(tmp_path: Path) -> None:
    """Q3_K is computed with as Q6_K: the same bits as a file in Q6_K with these values."""
    checkpoint = open_gguf(write(tmp_path / "a.gguf", "Q3_K"))
    made = fitted(checkpoint, KERNELS)
    for name in checkpoint.matrices():
        assert made.tensor(name).format == "Q6_K"
        assert np.array_equal(made.tensor(name).dequantize(), checkpoint.tensor(name).dequantize())
    assert made.weights_id != checkpoint.weights_id
    assert fitted(made, KERNELS).encoders == made.encoders
    assert fitted(checkpoint, None) is checkpoint


@pytest.mark.parametrize("name", sorted(SUBSTITUTES.keys() - {"I8", "I16", "I32", "I64"}))
def test_weights_asked_for_come_before_the_nearest(name: str, tmp_path: Path) -> None:
    """int4 takes what is smaller: the nearest format, if that has fewer bits than Q4_1."""
    checkpoint = open_gguf(write(tmp_path / "a.gguf", name))
    for weights, format in (("bf16", "BF16"), ("int8", "Q8_0"), ("int4", "Q4_1")):
        made = fitted(quantize(checkpoint, weights), KERNELS).matrices()["layers.0.up"].format
        smaller = FORMATS[SUBSTITUTES[name].format].row_bytes(256) <= FORMATS["Q4_1"].row_bytes(256)
        assert made == (SUBSTITUTES[name].format if weights == "int4" and smaller else format)


def test_nvfp4_has_a_scale_beside_a_matrix(tmp_path: Path) -> None:
    plain, scaled = (open_gguf(write(tmp_path / f"{scale}.gguf", "NVFP4", scale=scale)) for scale in (None, 0.3))
    for name in plain.matrices():
        expected = plain.tensor(name).dequantize() * np.float32(0.3)
        assert np.array_equal(scaled.tensor(name).dequantize(), expected)
        assert fitted(scaled, KERNELS).tensor(name).format == "Q8_0"


@pytest.mark.parametrize("vectors", ["F16", "F64"])
def test_norms_of_other_types(vectors: str, tmp_path: Path) -> None:
    checkpoint = open_gguf(write(tmp_path / "a.gguf", "Q8_0", vectors))
    assert np.array_equal(checkpoint.tensor("norm").dequantize(), np.ones(HIDDEN, np.float32))


def test_an_unknown_type_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "Q8_0")
    data = path.read_bytes()
    name = b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 16
    assert data[at : at + 4] == (8).to_bytes(4, "little")
    for number, called in ((4, "number 4"), (9, "Q8_1"), (99, "number 99")):
        path.write_bytes(data[:at] + number.to_bytes(4, "little") + data[at + 4 :])
        with pytest.raises(CheckpointError, match=f"tensor type {called} is not supported"):
            open_gguf(path)
