"""The catalog's models against transformers in float32, on weights that the `gguf` package dequantizes."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import gguf
import pytest
import torch
import transformers

from tests.models.test_against_transformers import all_logits, assert_close
from twostroke.api.llm import LLM

COUNTS = [1, 17, 600]  # 600 is past Gemma's window of 512
# Real text: random tokens give Gemma activations at which float32 itself has an error of 2e-3 (docs/log.md).
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
PROMPTS = ["The three laws of thermodynamics are", "def quicksort(items):\n"]


@pytest.fixture(autouse=True)
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads the file twice, and makes the names of all tensors for each of its modules."""
    for name in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.setattr(gguf, name, cache(getattr(gguf, name)))


def reference(path: Path, family: str) -> torch.nn.Module:
    if family != "gemma3":
        options = {"gguf_file": path.name, "dtype": torch.float32}
        return transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options)
    return gemma(path)


def gemma(path: Path) -> torch.nn.Module:
    """transformers does not read Gemma 3 from GGUF, so its model is filled tensor by tensor."""
    reader = gguf.GGUFReader(path)
    config = transformers.Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        max_position_embeddings=32768,
    )
    model = transformers.Gemma3ForCausalLM(config).eval()
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        stem = tensor.name.removesuffix(".weight")
        if stem == "token_embd":
            state["model.embed_tokens.weight"] = state["lm_head.weight"] = values
        elif stem == "output_norm":
            state["model.norm.weight"] = values - 1  # GGUF stores Gemma's norms with the 1 added
        else:
            _, layer, part = stem.split(".")
            state[f"model.layers.{layer}.{names[part]}.weight"] = values - 1 if part.endswith("norm") else values
    model.load_state_dict(state)
    return model


def check(name: str, llm: LLM, counts: Sequence[int] = COUNTS) -> None:
    theirs, text = reference(llm.path, llm.config.architecture), llm.tokenizer.encode(TEXT)
    with torch.no_grad():
        for count in counts:
            ids = text[7 : 7 + count]
            assert_close(all_logits(llm, ids), theirs(torch.tensor([ids])).logits[0].numpy())
        for prompt in PROMPTS:
            ids = llm.tokenizer.encode(prompt)
            made = [token.id for token in llm.decode(llm.prefill(ids), max_tokens=24, ignore_eos=True)]
            logits = theirs(torch.tensor([ids + made[:-1]])).logits[0, len(ids) - 1 :]
            assert logits.argmax(-1).tolist() == made, f"{name} continues {prompt!r} differently"


@pytest.mark.parametrize("counts", [(1, 17, 130), pytest.param((600,), marks=pytest.mark.nightly)])
def test_smollm(counts: Sequence[int]) -> None:
    check("smollm2-135m", LLM("smollm2-135m", backend="reference", kv_bytes=1 << 30), counts)


@pytest.mark.models
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "gemma3-270m"])
def test_larger_models(name: str) -> None:
    check(name, LLM(name, backend="reference", kv_bytes=1 << 30))
