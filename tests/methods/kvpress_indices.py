"""What kvpress keeps of a tiny model's prompt, in float32 in transformers: recorded, since kvpress is no dependency.

`pip install kvpress` elsewhere, then `python -m tests.methods.kvpress_indices` writes the file anew (kvpress 0.5.5).
"""

import json
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.tiny import write_model

RECORDED = Path(__file__).with_name("kvpress_indices.json")
FAMILIES = ("llama", "qwen3")
TOKENS = [3 + 7 * i % 180 for i in range(120)]
# Our technique with its options, and the press with its own. LagKV's budget lets each part keep as many entries, since
# kvpress takes any of equal ranks.
CASES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("tova", {"budget": 30}, "TOVAPress", {}),
    ("keydiff", {"budget": 30}, "KeyDiffPress", {}),
    ("key-norms", {"budget": 30}, "KnormPress", {}),
    ("curdkv", {"budget": 30, "part": 7}, "CURPress", {"local_window_size": 7}),
    ("expected-attention", {"budget": 30, "future": 99}, "ExpectedAttentionPress", {"n_future_positions": 99}),
    ("heavy-hitters", {"budget": 30, "recent": 0, "mean": True}, "ObservedAttentionPress", {}),
    ("lagkv", {"budget": 4 + 2 * 13 + 12, "lag": 8}, "LagKVPress", {"n_sink": 4, "lag_size": 8}),
    (
        "snap",
        {"budget": 30, "window": 5, "kernel": 3, "pool": "mean", "per": "head"},
        "SnapKVPress",
        {"window_size": 5, "kernel_size": 3},
    ),
]


@torch.inference_mode()
def kept(model: Any, press: Any, count: int) -> list[list[list[int]]]:
    """The indices of greatest score for each layer and head, the best first."""
    layers: list[list[list[int]]] = []
    score = press.score

    def seen(*arguments: Any) -> torch.Tensor:
        scores = score(*arguments)
        layers.append(scores[0].topk(count).indices.tolist())
        return scores

    press.score = seen
    with press(model):
        model(torch.tensor([TOKENS]))
    return layers


def record() -> None:
    kvpress, found = import_module("kvpress"), {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as directory:
            path = write_model(family, Path(directory))
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager"
            )
        found[family] = {
            name: kept(model, getattr(kvpress, press)(compression_ratio=0.5, **own), options["budget"])
            for name, options, press, own in CASES
        }
    RECORDED.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    record()
