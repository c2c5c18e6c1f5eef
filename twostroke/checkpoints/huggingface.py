"""Hugging Face directories: config.json and safetensors files, mapped rather than read.

Meanings and defaults of config keys are those of transformers' `configuration_*.py` of each family, in the old form
(rope_theta, rope_scaling) and in that of transformers 5 (rope_parameters, by layer type for Gemma 3).
"""

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite, pi
from pathlib import Path
from typing import Any

import numpy as np

from twostroke.checkpoints.checkpoint import Checkpoint, HfTokenizerSource
from twostroke.checkpoints.generation import directory_generation
from twostroke.errors import CheckpointError, UnsupportedArchitecture
from twostroke.formats.tensor import RawTensor
from twostroke.models.config import ModelConfig, stored_names
from twostroke.models.rope import Rope
from twostroke.system.mapped import MappedFile

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100 << 20  # the safetensors format's own limit
LIMIT = 1 << 31  # no count in a real config comes near; a damaged one must not make us allocate by it
PREFIXES = ("model.language_model.", "language_model.model.", "model.")  # the first two: Gemma 3 with vision
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
# Other parts of multimodal checkpoints, and tables that follow from the config: text generation needs neither.
UNUSED = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*|.*\.rotary_emb\.inv_freq")

# What each family's config class assumes for an absent key; nested Gemma 3 configs on the hub leave many out.
COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000,
          "num_attention_heads": 32, "hidden_act": "silu", "tie_word_embeddings": False}  # fmt: skip
QWEN = COMMON | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "sliding_window": 4096,
                 "max_position_embeddings": 32768, "max_window_layers": 28}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": COMMON | {"intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": COMMON | {"intermediate_size": 14336, "max_position_embeddings": 131072, "num_key_value_heads": 8,
                         "sliding_window": 4096},
    "qwen2": QWEN,
    "qwen3": QWEN | {"head_dim": 128},
    "gemma3_text": {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
                    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
                    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "rope_theta": 1e6,
                    "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256, "sliding_window": 4096,
                    "sliding_window_pattern": 6, "tie_word_embeddings": True},
}  # fmt: skip
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
UNSUPPORTED_KEYS = ("attention_bias", "mlp_bias", "final_logit_softcapping", "attn_logit_softcapping",
                    "use_bidirectional_attention", "quantization_config")  # fmt: skip

NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
# Gemma 3 also has a norm after attention, so that what precedes the MLP goes by another name.
POST_NORM_NAMES = NAMES | {
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}


class _Config:
    """Typed access to config.json: an absent key has its family's default, a bad value is a CheckpointError."""

    def __init__(self, values: Mapping[str, Any], family: str, path: Path) -> None:
        self.values, self.family, self.path = values, family, path

    def get(self, key: str) -> Any:
        return self.values[key] if key in self.values else DEFAULTS[self.family].get(key)

    def integer(self, key: str, default: int | None = None, limit: int = LIMIT) -> int:
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < limit:
            raise CheckpointError(f"{self.path}: {key} must be a positive integer; it is {value!r:.40}")
        return value

    def number(self, key: str, among: Mapping[str, Any] | None = None) -> float:
        """A positive number, at the top level or in a nested object."""
        value = self.get(key) if among is None else among.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value) or value <= 0:
            raise CheckpointError(f"{self.path}: {key} must be a positive number; it is {value!r:.40}")
        return float(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.get(key)
        if not isinstance(value, dict | None):
            raise CheckpointError(f"{self.path}: {key} must be an object; it is {value!r:.40}")
        return value or {}

    def unsupported(self, what: str) -> UnsupportedArchitecture:
        return UnsupportedArchitecture(f"{self.path}: architecture {self.family} with {what:.80} is not supported")


def read_config(path: Path, num_tensors: int) -> ModelConfig:
    """The model a config.json describes; it cannot have more layers than `num_tensors`.

    Raises UnsupportedArchitecture for other families, RoPE types and variants, CheckpointError for bad values.
    """
    outer = _read_json(path)
    family, values = str(outer.get("model_type")), outer
    if family == "gemma3":  # with vision: the language model's own config is inside
        inner = outer.get("text_config")
        if not isinstance(inner, dict):
            raise CheckpointError(f"{path}: text_config must be an object")
        family, values = "gemma3_text", {k: outer[k] for k in ("tie_word_embeddings",) if k in outer} | inner
    if family not in DEFAULTS:
        known = ", ".join([*DEFAULTS, "gemma3"])
        raise UnsupportedArchitecture(f"{path}: model_type {family[:40]!r} is not supported, only {known}")
    config = _Config(values, family, path)
    for key in UNSUPPORTED_KEYS:
        if config.get(key) or outer.get(key):
            raise config.unsupported(key)
    gemma = family == "gemma3_text"
    activation = str(config.get("hidden_activation" if gemma else "hidden_act"))
    if ACTIVATIONS.get(activation) != ("gelu_tanh" if gemma else "silu"):
        raise config.unsupported(f"activation {activation!r}")
    hidden, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", default=num_heads)
    num_layers = config.integer("num_hidden_layers", limit=num_tensors + 1)
    head_dim = config.integer("head_dim", default=hidden // num_heads, limit=1 << 14)
    if num_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(f"{path}: {num_heads} heads of {head_dim} and {num_kv_heads} KV heads cannot be")
    windows = _windows(config, num_layers)
    return ModelConfig(
        architecture="gemma3" if gemma else family,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size"),
        max_position=config.integer("max_position_embeddings"),
        norm_eps=config.number("rms_norm_eps"),
        attention_scale=(config.number("query_pre_attn_scalar") if gemma else head_dim) ** -0.5,
        ropes=_ropes(config, head_dim, windows),
        windows=windows,
        tied=bool(config.get("tie_word_embeddings")),
        attention_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "gemma3_text"),
        post_norms=gemma,
        activation=ACTIVATIONS[activation],
        embedding_scale=hidden**0.5 if gemma else 1.0,
    )


def _windows(config: _Config, num_layers: int) -> tuple[int | None, ...]:
    layer_types = config.get("layer_types")
    if config.family == "llama":
        return (None,) * num_layers
    if config.family == "mistral":
        if layer_types is not None:
            raise config.unsupported("layer_types")
        return (None if config.get("sliding_window") is None else config.integer("sliding_window"),) * num_layers
    gemma = config.family == "gemma3_text"
    if not gemma and not (config.get("use_sliding_window") and config.get("sliding_window")):
        return (None,) * num_layers
    if layer_types is None:
        if gemma:
            period = config.integer("sliding_window_pattern")
            sliding = [(i + 1) % period != 0 for i in range(num_layers)]
        else:
            full_layers = config.get("max_window_layers")  # 0 is sensible here, so it is not `integer`
            if type(full_layers) is not int:
                raise CheckpointError(f"{config.path}: max_window_layers must be an integer")
            sliding = [i >= full_layers for i in range(num_layers)]
    else:
        if not isinstance(layer_types, list) or len(layer_types) != num_layers:
            raise CheckpointError(f"{config.path}: layer_types must be a list of {num_layers}")
        if not all(kind in ("sliding_attention", "full_attention") for kind in layer_types):
            raise config.unsupported("layer_types other than full_attention and sliding_attention")
        sliding = [kind == "sliding_attention" for kind in layer_types]
    window = config.integer("sliding_window") if any(sliding) else None
    return tuple(window if slides else None for slides in sliding)


def _ropes(config: _Config, head_dim: int, windows: tuple[int | None, ...]) -> tuple[Rope, ...]:
    parameters, scaling = config.mapping("rope_parameters"), config.mapping("rope_scaling")
    if config.family != "gemma3_text":
        return (_rope(config, scaling or parameters, "rope_theta", head_dim),) * len(windows)
    # Before transformers 5 there was one set, for the full-attention layers, and a base for the others.
    full, sliding = parameters.get("full_attention") or {}, parameters.get("sliding_attention") or {}
    if not isinstance(full, dict) or not isinstance(sliding, dict):
        raise CheckpointError(f"{config.path}: rope_parameters must hold an object for each layer type")
    global_rope = _rope(config, {**full, **scaling}, "rope_theta", head_dim)
    local_rope = _rope(config, sliding, "rope_local_base_freq", head_dim)
    return tuple(global_rope if window is None else local_rope for window in windows)


def _rope(config: _Config, parameters: Mapping[str, Any], base_key: str, head_dim: int) -> Rope:
    """One rotary embedding from its parameters; the base may stand among them or at the top level as `base_key`."""
    base = config.number("rope_theta", parameters) if "rope_theta" in parameters else config.number(base_key)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    for value in (parameters.get("partial_rotary_factor"), config.get("partial_rotary_factor")):
        if value not in (None, 1):
            raise config.unsupported(f"partial_rotary_factor {value}")
    if kind == "default":
        return Rope(base)
    if kind not in ("linear", "llama3"):
        raise config.unsupported(f"rope_type {kind!r}")
    factor = config.number("factor", parameters)
    if kind == "linear":
        return Rope(base, (factor,) * (head_dim // 2))
    low, high = config.number("low_freq_factor", parameters), config.number("high_freq_factor", parameters)
    if high <= low:
        raise CheckpointError(f"{config.path}: high_freq_factor must be greater than low_freq_factor")
    original = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    original = config.number("context", {"context": original or config.get("max_position_embeddings")})
    # How often each pair turns in the original context: below `low` it is slowed by `factor`, above `high` not at all,
    # and in between frequencies are interpolated.
    turns = original / (2 * pi) * base ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return Rope(base, tuple((1 / ((1 - smooth) / factor + smooth)).tolist()))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return value


def read_safetensors(path: Path) -> dict[str, RawTensor]:
    """The tensors of one file, each as one row of bytes in the file's map; `format` is whatever dtype the file says.

    The layout: 8 bytes of header length, the header in JSON (name -> dtype, shape, data_offsets), the data.
    Raises CheckpointError naming the file, and the tensor if any.
    """
    try:
        buffer = MappedFile(path)
        (length,) = struct.unpack_from("<Q", buffer)
        if length > min(MAX_HEADER, len(buffer) - 8):
            raise ValueError(f"a header of {length} bytes in a file of {len(buffer)}")
        header = json.loads(buffer[8 : 8 + length])
        if not isinstance(header, dict):
            raise ValueError("the header is not an object")
    except (OSError, struct.error, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None
    data = np.frombuffer(buffer, np.uint8)[8 + length :]
    tensors: dict[str, RawTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        source = f"{path}: {name}"
        if not name.isprintable():  # it stands in messages, which are one line
            raise CheckpointError(f"{path}: {name!r}: the name of a tensor cannot be that")
        try:
            dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{source}: its entry in the header is damaged") from None
        if not all(type(number) is int and number >= 0 for number in (*shape, start, end)) or start > end:
            raise CheckpointError(f"{source}: shape {shape} at bytes {start} to {end} cannot be")
        if end > data.size:
            raise CheckpointError(
                f"{source}: truncated: data end at byte {end}, the file's at {data.size}; get it again"
            )
        tensors[name] = RawTensor(name, str(dtype), shape, data[start:end].reshape(1, -1), source)
    return tensors


def _read_all(directory: Path) -> tuple[tuple[Path, ...], dict[str, RawTensor]]:
    if (directory / SINGLE).is_file():
        return (directory / SINGLE,), read_safetensors(directory / SINGLE)
    index = directory / INDEX
    if not index.is_file():
        raise CheckpointError(f"{directory}: there is neither {SINGLE} nor {INDEX}; only safetensors are read")
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in places.values()
    ):
        raise CheckpointError(f"{index}: weight_map must map tensors to files beside it")
    shards = {file: read_safetensors(directory / file) for file in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in shards[file]:
            raise CheckpointError(f"{directory / file}: {name}: the tensor is missing, though {INDEX} says it is here")
    return tuple(directory / file for file in shards), {name: shards[file][name] for name, file in places.items()}


def tensor_names(config: ModelConfig, prefix: str, head: str) -> dict[str, str]:
    """Twostroke name -> name in the files, for every tensor of the model."""
    outer = {"embed": f"{prefix}embed_tokens.weight", "norm": f"{prefix}norm.weight", "head": head}
    parts = POST_NORM_NAMES if config.post_norms else NAMES
    return stored_names(config, outer, prefix + "layers.{}.", parts)


def _plus_one(tensor: RawTensor) -> RawTensor:
    """Gemma multiplies by 1 + w in float32; the shifted norms are kept in float32 for the same reason."""
    shifted = tensor.dequantize() + np.float32(1)
    return replace(tensor, format="F32", data=shifted.view(np.uint8).reshape(1, -1))


def _licence(directory: Path) -> str | None:
    """The `license:` line of the model card's front matter."""
    try:
        card = (directory / "README.md").read_text(errors="replace")
    except OSError:
        return None
    front = re.match(r"---\n(.*?)\n---", card, re.DOTALL)
    found = re.search(r"^license:\s*(\S+)", front[1], re.MULTILINE) if front else None
    return found[1] if found else None


def open_huggingface(directory: Path, name: str | None = None) -> Checkpoint:
    """Opens a directory of one of the supported families; `name` defaults to the directory's.

    Raises UnsupportedArchitecture naming the family or variant, CheckpointError for damaged or incomplete files.
    """
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise CheckpointError(f"{directory}: there is no config.json")
    files, tensors = _read_all(directory)
    config = read_config(config_path, len(tensors))
    prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in tensors), PREFIXES[-1])
    names = tensor_names(config, prefix, next((head for head in HEADS if head in tensors), HEADS[0]))
    used = set(names.values()) | set(HEADS if config.tied else ())  # tied, the head is the embedding once more
    for theirs in tensors:
        if theirs not in used and not UNUSED.fullmatch(theirs):
            raise UnsupportedArchitecture(f"{tensors[theirs].source}: {config.architecture} has no such tensor")
    stored: dict[str, RawTensor] = {}
    for ours, theirs in names.items():
        found = tensors.get(theirs)
        if found is None:
            raise CheckpointError(f"{directory}: the tensor {theirs} is missing")
        if found.format not in ("F32", "F16", "BF16") or not found.shape:
            raise CheckpointError(f"{found.source}: {found.format} {found.shape}; only F32, F16 and BF16 are supported")
        stored[ours] = RawTensor.from_bytes(ours, found.format, found.shape, found.data.reshape(-1), found.source)
    shifted = [ours for ours in stored if ours.endswith("norm")] if config.architecture == "gemma3" else []
    return Checkpoint(
        name=name or directory.resolve().name,
        files=(config_path, *files),
        config=config,
        licence=_licence(directory),
        tokenizer_source=HfTokenizerSource(directory),
        stored=stored,
        transforms=dict.fromkeys(shifted, _plus_one),
        generation=directory_generation(directory),
    )
