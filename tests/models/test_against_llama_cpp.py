"""Logits agree with llama.cpp's on the GGUF file that its own converter makes, at night, where it is installed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.models import llama_cpp
from tests.models.test_against_transformers import LONG_SIZES, PAGE, all_logits, stated, tokens
from tests.tiny import LATENT
from twostroke.api.llm import LLM
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.gguf.opening import open_gguf
from twostroke.models.checkpoints.huggingface.directory import open_huggingface

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(llama_cpp.missing() is not None, reason=str(llama_cpp.missing())),
]
COUNTS = (1, 17, 600, 3000)
ROUNDED = ("gpt_oss",)  # llama.cpp widens YaRN's range to whole pairs, which files of this family do not want


def opened(path: Path, directory: Path) -> Checkpoint:
    return replace(open_gguf(path), tokenizer_source=open_huggingface(directory).tokenizer_source)


def reference_logits(checkpoint: Checkpoint | str, ids: list[int]) -> np.ndarray:
    return all_logits(LLM(checkpoint, backend="reference", threads=1, kv_bytes=64 << 20), ids)


def differences(family: str, room: Path) -> list[float]:
    """The largest differences of our logits to llama.cpp's, for each number of tokens."""
    directory, path = llama_cpp.converted(family, room, **LONG_SIZES)
    mine = str(directory) if family in ROUNDED else opened(path, directory)
    most = open_gguf(path).config.max_position
    texts = [tokens(min(count, most), llama_cpp.TOKENS, seed=count) for count in COUNTS]
    return [float(np.abs(reference_logits(mine, ids) - llama_cpp.logits(path, ids)).max()) for ids in texts]


def test_the_same_logits(family: str, tmp_path: Path) -> None:
    found = stated(PAGE.read_text())[family].llama_cpp
    *short, long = differences(family, tmp_path)
    assert max(short) <= found.short
    assert long <= found.long


# The layer and the position of the choice that llama.cpp makes otherwise, and what differs without it.
TIES = {"qwen2moe": (2, 2556, 2e-3), "gpt_oss": (1, 1667, 1e-2)}


@pytest.mark.parametrize("family", TIES)
def test_jumps_are_ties_of_a_router(family: str, tmp_path: Path) -> None:
    """With the next expert in place of the last chosen one in one row, transformers' logits are llama.cpp's."""
    number, position, most = TIES[family]
    directory, path = llama_cpp.converted(family, tmp_path, **LONG_SIZES)
    ids = tokens(max(COUNTS), llama_cpp.TOKENS, seed=max(COUNTS))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    mlp = model.model.layers[number].mlp
    router, gaps = mlp.gate if hasattr(mlp, "gate") else mlp.router, list[float]()

    def swapped(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The router's input, moved in that row along the difference of the two experts until they change places."""
        rows = args[0].reshape(-1, args[0].shape[-1]).clone()
        values, chosen = torch.nn.functional.linear(rows, router.weight, getattr(router, "bias", None)).sort(
            descending=True
        )
        last, other = chosen[position, router.top_k - 1], chosen[position, router.top_k]
        gap = values[position, router.top_k - 1] - values[position, router.top_k]
        apart = router.weight[last] - router.weight[other]
        rows[position] -= apart * (gap + 2e-5) / apart.square().sum()
        gaps.append(float(gap))
        return (rows.reshape(args[0].shape), *args[1:])

    theirs = llama_cpp.logits(path, ids)
    handle = router.register_forward_pre_hook(swapped)
    with torch.no_grad():
        found = model(torch.tensor([ids])).logits[0].numpy()
        handle.remove()
        plain = model(torch.tensor([ids])).logits[0].numpy()
    assert gaps[0] < 2e-4  # of router logits whose median gap there is 0.4 or more
    assert np.abs(found - theirs).max() <= most
    assert np.abs(plain - theirs).max() > 20 * most
    assert np.abs(plain - theirs)[:position].max() <= most


# The number of each type in llama.cpp. MXFP4 is that of experts, where there are any.
TYPES = {"Q8_0": 7, "Q6_K": 18, "Q4_K_M": 15, "IQ4_XS": 30, "MXFP4": 38}
# Blocks have 256 numbers; a matrix with another number of columns has another type there.
WHOLE_BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
OWN_SIZES = ("phi3", "gemma4", "gemma4-12b", "gemma4-moe", "granite4")  # which want theirs: other types take the place


def quantized_differences(family: str, room: Path, types: Sequence[str] = tuple(TYPES)) -> dict[str, float]:
    """How far our logits are from llama.cpp's on its files of each type, as a part of their size: the median of rows,
    since a router's choice may fall otherwise in some."""
    sizes = {} if family in OWN_SIZES else WHOLE_BLOCKS | (HEADS if family not in LATENT else {})
    directory, path = llama_cpp.converted(family, room, **sizes)
    ids, found = tokens(40, llama_cpp.TOKENS, seed=3), dict[str, float]()
    for kind in types:
        theirs = llama_cpp.logits(path, ids, (TYPES[kind], room / "small.gguf"))
        checkpoint = opened(room / "small.gguf", directory)
        formats = {tensor.format for tensor in checkpoint.matrices().values()}
        assert kind.removesuffix("_M") in formats or kind == "MXFP4" or not sizes, (kind, formats)
        mine = reference_logits(checkpoint, ids)
        off = np.linalg.norm(mine - theirs, axis=-1) / np.linalg.norm(theirs, axis=-1)
        found[kind] = float(np.median(off))
    return found


def test_quantized_by_llama_cpp(family: str, tmp_path: Path) -> None:
    """Both read the same weights: what they make of them differs by the stated part, as llama.cpp rounds activations to
    8 bits there, and by much less than 4 bits change the model."""
    found = quantized_differences(family, tmp_path)
    assert max(found.values()) <= stated(PAGE.read_text())[family].quantized
