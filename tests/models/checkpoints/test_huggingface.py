"""Hugging Face directories written by transformers, against transformers' results."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from twostroke.errors import CheckpointError, UnsupportedArchitecture
from twostroke.models.checkpoints.checkpoint import Checkpoint, HfTokenizerSource
from twostroke.models.checkpoints.huggingface.directory import open_huggingface, tensor_names
from twostroke.models.checkpoints.huggingface.safetensors import read_safetensors
from twostroke.models.rope import Rope
from twostroke.models.tensor_shapes import tensor_shapes

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 256}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 2e4, "factor": 4.0}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def build(family: str) -> PreTrainedModel:
    """A tiny random model of a family, norms and biases included."""
    torch.manual_seed(0)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=16))
    elif family == "llama3":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=32, rope_parameters=LLAMA3, tie_word_embeddings=True))
    elif family == "linear":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LINEAR))
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(
            Qwen2Config(
                **SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1, tie_word_embeddings=True
            )
        )
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16))
    else:
        text = Gemma3TextConfig(
            **SIZES, head_dim=16, sliding_window=8, query_pre_attn_scalar=24, rope_parameters=GEMMA_ROPES,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )  # fmt: skip
        if family == "gemma3_text":
            model = Gemma3ForCausalLM(text)
        else:
            vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                      "image_size": 28, "patch_size": 14}  # fmt: skip
            model = Gemma3ForConditionalGeneration(
                Gemma3Config(
                    text_config=text.to_dict(), vision_config=vision, image_token_index=47, mm_tokens_per_image=4
                )
            )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


FAMILIES = ("llama", "llama3", "linear", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma3")
MODELS: dict[str, PreTrainedModel] = {}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    if request.param not in MODELS:
        MODELS[request.param] = build(request.param)
    return request.param


def text_parts(model: PreTrainedModel) -> tuple[Any, Any]:
    """The text config, and the decoder with its rotary embedding."""
    decoder: Any = model.model
    return model.config.get_text_config(), getattr(decoder, "language_model", decoder)


def frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    plain = rope.base ** (-2.0 * torch.arange(head_dim // 2, dtype=torch.float64) / head_dim)
    return plain / torch.tensor(rope.factors or [1.0], dtype=torch.float64)


def assert_tensors_equal(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    state = model.state_dict()
    prefix = "model.language_model." if "model.language_model.norm.weight" in state else "model."
    names = tensor_names(checkpoint.config, prefix, "lm_head.weight")
    assert checkpoint.names() == set(names) == set(tensor_shapes(checkpoint.config))
    for ours, theirs in names.items():
        shift = 1 if checkpoint.config.architecture == "gemma3" and ours.endswith("norm") else 0
        assert torch.equal(torch.from_numpy(checkpoint.tensor(ours).dequantize()), state[theirs].float() + shift), ours


@pytest.mark.parametrize("shard_size", ["1GB", "8KB"])
def test_every_tensor_is_the_saved_one(family: str, shard_size: str, tmp_path: Path) -> None:
    MODELS[family].save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors").exists() == (shard_size == "1GB")
    checkpoint = open_huggingface(tmp_path)
    assert_tensors_equal(checkpoint, MODELS[family])
    assert (len(checkpoint.files) == 2) == (shard_size == "1GB")
    assert checkpoint.name == tmp_path.name
    assert checkpoint.tokenizer_source == HfTokenizerSource(tmp_path)


def test_the_config_means_what_it_means_to_transformers(family: str, tmp_path: Path) -> None:
    MODELS[family].save_pretrained(tmp_path)
    ours = open_huggingface(tmp_path).config
    theirs, decoder = text_parts(MODELS[family])
    assert (ours.num_layers, ours.hidden_size, ours.vocab_size) == (3, 32, 48)
    assert (ours.num_heads, ours.num_kv_heads, ours.layers[0].feed_forward.intermediate_size) == (4, 2, 40)
    assert ours.max_position == 4096
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tied == MODELS[family].config.tie_word_embeddings
    for i, layer in enumerate(decoder.layers):
        attention = layer.self_attn
        assert ours.head_dim == attention.head_dim
        assert ours.layers[i].attention.scale == attention.scaling
        assert ours.layers[i].attention.bias == (attention.q_proj.bias is not None)
        assert ours.layers[i].attention.qk_norm == hasattr(attention, "q_norm")
        window = theirs.sliding_window if family == "mistral" else getattr(attention, "sliding_window", None)
        assert ours.windows[i] == window
        kind = f"{theirs.layer_types[i]}_" if ours.architecture == "gemma3" else ""
        expected = getattr(decoder.rotary_emb, f"{kind}inv_freq").double()
        assert torch.allclose(frequencies(ours.ropes[i], ours.head_dim), expected, rtol=1e-6, atol=0)
    assert ours.layers[0].post_norms == hasattr(decoder.layers[0], "pre_feedforward_layernorm")
    assert ours.embedding_scale == getattr(decoder.embed_tokens, "scalar_embed_scale", 1.0)
    assert ours.layers[0].feed_forward.activation == ("gelu_tanh" if "gemma" in family else "silu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_mapped_not_copied(dtype: torch.dtype, tmp_path: Path) -> None:
    model: Any = build("gemma3_text")
    model = model.to(dtype)
    model.save_pretrained(tmp_path)
    checkpoint = open_huggingface(tmp_path)
    assert_tensors_equal(checkpoint, model)
    matrix = checkpoint.tensor("layers.0.q")
    assert matrix.format == {torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    assert not matrix.data.flags.owndata
    assert not matrix.data.flags.writeable


def edited(family: str, folder: Path, changes: dict[str, Any], remove: tuple[str, ...] = ()) -> Path:
    """A saved model with its config.json changed."""
    MODELS.setdefault(family, build(family)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in remove} | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_old_form_of_rope_is_read(tmp_path: Path) -> None:
    new = open_huggingface(edited("llama3", tmp_path / "a", {})).config
    old_keys = {"rope_theta": 5e5, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}}
    old = open_huggingface(edited("llama3", tmp_path / "b", old_keys, remove=("rope_parameters",))).config
    assert old == new
    older = {"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert open_huggingface(edited("linear", tmp_path / "c", older, remove=("rope_parameters",))).config.ropes == (
        (Rope(2e4, (4.0,) * 4),) * 3
    )


def test_the_old_form_of_gemma_is_read(tmp_path: Path) -> None:
    old_keys = {"rope_theta": 3e6, "rope_local_base_freq": 5e3, "sliding_window_pattern": 2,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0}}  # fmt: skip
    folder = edited("gemma3_text", tmp_path, old_keys, remove=("rope_parameters", "layer_types"))
    config = open_huggingface(folder).config
    assert config.windows == (8, None, 8)
    assert config.ropes == (Rope(5e3), Rope(3e6, (8.0,) * 8), Rope(5e3))
    folder = edited("gemma3_text", tmp_path, {}, remove=("rope_parameters", "layer_types"))
    config = open_huggingface(folder).config
    assert config.windows == (8, 8, 8)
    assert config.ropes == (Rope(1e4),) * 3


def test_defaults_are_the_families(tmp_path: Path) -> None:
    absent = ("tie_word_embeddings", "sliding_window", "rms_norm_eps", "hidden_act", "rope_parameters")
    config = open_huggingface(edited("mistral", tmp_path, {}, remove=absent)).config
    assert config.windows == (4096,) * 3
    assert not config.tied
    assert config.ropes[0] == Rope(1e4)
    assert open_huggingface(edited("mistral", tmp_path, {"sliding_window": None})).config.windows == (None,) * 3
    assert open_huggingface(edited("gemma3_text", tmp_path, {}, remove=("tie_word_embeddings",))).config.tied
    assert open_huggingface(edited("qwen2", tmp_path, {"use_sliding_window": False})).config.windows == (None,) * 3


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"model_type": "falcon"}, "model_type 'falcon' is not supported, only llama"),
        ("llama", {"hidden_act": "relu"}, "activation 'relu'"),
        ("llama", {"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}, "rope_type 'axial'"),
        ("llama", {"quantization_config": {"quant_method": "aqlm"}}, "quantized by 'aqlm' are not supported"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
    ],
)
def test_variants_we_lack_are_refused(family: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedArchitecture, match=message) as caught:
        open_huggingface(edited(family, tmp_path, changes))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "many"}, "hidden_size must be a positive integer; it is 'many'"),
        ({"hidden_size": 64}, "model.embed_tokens.weight: shape"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": 4}, r"the tensor model\.layers\.3\.input_layernorm\.weight is missing"),
        ({"num_key_value_heads": 3}, "4 heads"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"rope_parameters": []}, "rope_parameters must be an object"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor must be a positive number; it is missing"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor must be greater"),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_huggingface(edited("llama", tmp_path, changes))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no config\.json"):
        open_huggingface(tmp_path)
    edited("llama", tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="only safetensors are read"):
        open_huggingface(tmp_path)
    MODELS["llama"].save_pretrained(tmp_path, max_shard_size="8KB")
    shard = min(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        open_huggingface(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../../secret"}}))
    with pytest.raises(CheckpointError, match="files beside it"):
        open_huggingface(tmp_path)


def test_stray_tensors_and_dtypes_are_refused(tmp_path: Path) -> None:
    edited("llama", tmp_path, {})
    state = {name: value.clone() for name, value in MODELS["llama"].state_dict().items()}
    save_file(state | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedArchitecture, match=r"q_proj\.bias: llama has no such tensor"):
        open_huggingface(tmp_path)
    save_file(state | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}, tmp_path / "model.safetensors")
    assert open_huggingface(tmp_path).config.num_layers == 3
    state["model.norm.weight"] = state["model.norm.weight"].double()
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: F64 .* only F32, F16 and BF16"):
        open_huggingface(tmp_path)


def test_the_licence_comes_from_the_card(tmp_path: Path) -> None:
    edited("llama", tmp_path, {})
    assert open_huggingface(tmp_path).licence is None
    (tmp_path / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Model\nlicense: other\n")
    assert open_huggingface(tmp_path).licence == "apache-2.0"


def test_damaged_safetensors_raise_checkpoint_error(tmp_path: Path) -> None:
    edited("llama", tmp_path, {})
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    for damaged in (b"", data[:5], data[:20], data[: 8 + length], data[:-1], struct.pack("<Q", 1 << 62) + data[8:]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=str(path)):
            open_huggingface(tmp_path)
    for position in range(0, 8 + length, 7):
        for value in (0, 34, 49, 255):
            path.write_bytes(data[:position] + bytes([value]) + data[position + 1 :])
            try:
                open_huggingface(tmp_path)
            except CheckpointError as error:
                message = str(error)
            else:
                message = "opened"
            assert "\n" not in message


def test_a_header_cannot_lie_about_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"

    def header(entry: Any) -> None:
        text = json.dumps({"w": entry}).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))

    header({"dtype": "F32", "shape": [4], "data_offsets": [0, 16]})
    assert read_safetensors(path)["w"].nbytes == 16
    for entry in ([], {"dtype": "F32"}, {"dtype": "F32", "shape": 4, "data_offsets": [0, 16]},
                  {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
                  {"dtype": "F32", "shape": [4], "data_offsets": [0, 17]},
                  {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]},
                  {"dtype": "F32", "shape": [4], "data_offsets": [0.5, 16]}):  # fmt: skip
        header(entry)
        with pytest.raises(CheckpointError, match=r"a\.safetensors: w: "):
            read_safetensors(path)
