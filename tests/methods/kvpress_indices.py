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
CHUNKED = {"compression_ratio": 0.75, "window_size": 10, "kernel_size": 1}  # SnapKV, by which chunks are chosen
# Our technique with its options, and the press with its own. LagKV's budget lets each part keep as many entries, since
# kvpress takes any of equal ranks.
CASES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("tova", {"budget": 30}, "TOVAPress", {}),
    ("keydiff", {"budget": 30}, "KeyDiffPress", {}),
    ("key-norms", {"budget": 30}, "KnormPress", {}),
    ("curdkv", {"budget": 30, "part": 7}, "CURPress", {"local_window_size": 7}),
    ("expected-attention", {"budget": 30, "future": 99}, "ExpectedAttentionPress", {"n_future_positions": 99}),
    ("heavy-hitters", {"budget": 30, "recent": 0, "mean": True}, "ObservedAttentionPress", {}),
    ("chunkkv", {"budget": 30, "newest": 10}, "ChunkKVPress", {"chunk_length": 10, "press": CHUNKED}),
    ("kvzip", {"budget": 30, "part": 50}, "KVzipPress", {"chunk_size": 50}),
    ("finch", {"budget": 30, "question": 5}, "FinchPress", {"rerotate_keys": False}),
    ("lagkv", {"budget": 4 + 2 * 13 + 12, "lag": 8}, "LagKVPress", {"n_sink": 4, "lag_size": 8}),
    (
        "snap",
        {"budget": 30, "window": 5, "kernel": 3, "pool": "mean", "per": "head"},
        "SnapKVPress",
        {"window_size": 5, "kernel_size": 3},
    ),
    (
        "critical-kv",
        {"budget": 30, "newest": 5, "kernel": 3},
        "CriticalKVPress",
        {"scorer": ("SnapKVPress", {"window_size": 5, "kernel_size": 3})},
    ),
    (
        "critical-kv+ada",  # the share of the budget that goes by attention alone is kvpress's default in both
        {"budget": 30, "by": "tova", "newest": 1, "budgets": "ada"},
        "CriticalAdaKVPress",
        {"scorer": ("TOVAPress", {})},
    ),
]


@torch.inference_mode()
def kept(model: Any, press: Any, count: int) -> list[list[list[int]]]:
    """The indices of greatest score for each layer and head, the best first; of chunks, those that stay."""
    layers: list[list[list[int]]] = []

    def ranked(scores: torch.Tensor) -> torch.Tensor:
        layers.append(scores[0].topk(count).indices.tolist())
        return scores

    if hasattr(press, "alpha_safeguard"):
        compress = press.compress

        def masked(module: Any, hidden: torch.Tensor, keys: torch.Tensor, *others: Any) -> Any:
            made = compress(module, hidden, keys, *others)
            sees = torch.ones(keys.shape[1:3], dtype=torch.bool)
            sees[module.masked_key_indices[1], module.masked_key_indices[2]] = False
            module.masked_key_indices = None
            layers.append([head.nonzero()[:, 0].tolist() for head in sees])
            return made

        press.compress = masked
    elif hasattr(press, "chunk_length") and hasattr(press, "press"):
        compress = press.compress

        def compressed(module: Any, hidden: torch.Tensor, keys: torch.Tensor, *others: Any) -> Any:
            made = compress(module, hidden, keys, *others)
            same = (made[0][0][:, :, None] == keys[0][:, None]).all(-1)
            layers.append(same.int().argmax(-1).tolist())
            return made

        press.compress = compressed
    elif hasattr(press, "compress_post"):

        def ended(_: Any) -> None:
            press.score_val[..., : press.n_sink] = 1  # they stay, as in what is replaced here
            for scores in press.score_val:
                ranked(scores)

        press.compress_post = ended
    else:
        score = press.score
        press.score = lambda *arguments: ranked(score(*arguments))
    model.set_attn_implementation("eager" if type(press).__name__ == "ObservedAttentionPress" else "sdpa")
    with press(model):
        model(input_ids=torch.tensor([TOKENS]), past_key_values=transformers.DynamicCache())
    return layers


def record() -> None:
    kvpress, found = import_module("kvpress"), {}

    def made(press: str, own: dict[str, Any]) -> Any:
        inner = {"press": kvpress.SnapKVPress(**own["press"])} if "press" in own else {"compression_ratio": 0.5}
        if "scorer" in own:
            name, options = own["scorer"]
            return getattr(kvpress, press)(press=getattr(kvpress, name)(compression_ratio=0.75, **options))
        one = getattr(kvpress, press)(**(own | inner))
        if press == "FinchPress":  # no token says where the question begins
            one.window_size, one.delimiter_token_id = 5, -1
        return one

    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as directory:
            path = write_model(family, Path(directory))
            # Without a chat template, KVzip repeats all of it.
            (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            found[family] = {
                name: kept(model, made(press, own), options["budget"]) for name, options, press, own in CASES
            }
    RECORDED.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    record()
