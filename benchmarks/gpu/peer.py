"""Our engine beside transformers on one card: continuous batching, and `generate` with a static batch.

    python3 -m benchmarks.gpu.peer --models qwen2.5-0.5b llama-3.1-8b --out peer.json

All have random weights of the same shapes in bfloat16, the same prompts, and answers of the same length. They take
turns. Prompts have one length, so the static batch has no padding: the best case for `generate`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from inspect import signature
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, markdown, parser
from benchmarks.gpu.card import Card
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.opened import open_llm, random_prompts
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.models.config import Experts, ModelConfig
from twostroke.sampling.params import SamplingParams

OURS, BATCHING, GENERATE = "twostroke", "transformers, continuous batching", "transformers, generate"
Answers = Callable[[list[list[int]]], int]  # answers prompts; returns the number of tokens made
DEFINITIONS = {
    "seconds": "from the first call until all tokens of all answers are there",
    "output_per_second": "output tokens of all answers / seconds",
    "total_per_second": "prompt and output tokens of all answers / seconds",
    "ratio": "median of ours / median of that engine, output tokens per second",
}


@dataclass(frozen=True)
class Load:
    """`sequences` prompts of `prompt` random tokens, answered with exactly `output` tokens each."""

    sequences: int = 64
    prompt: int = 512
    output: int = 128

    @property
    def entries(self) -> int:
        return self.sequences * (self.prompt + self.output)


def their_config(config: ModelConfig) -> Any:
    """transformers' configuration of the same model. Its RoPE is never scaled, which takes the same time."""
    import transformers

    feed_forward = config.layers[0].feed_forward
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "intermediate_size": feed_forward.intermediate_size,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if isinstance(feed_forward, Experts):
        values |= {
            "num_experts": feed_forward.count,
            "num_experts_per_tok": feed_forward.chosen,
            "moe_intermediate_size": feed_forward.intermediate_size,
            "norm_topk_prob": feed_forward.normalized,
        }
    kinds: dict[str, Any] = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3moe": transformers.Qwen3MoeConfig,
    }
    return kinds[config.architecture](**values)


class Transformers:
    """A model of transformers with random weights."""

    def __init__(self, config: ModelConfig, device: str, attention: str, load: Load) -> None:
        import transformers

        self.device, self.load = device, load
        with torch.device(device):
            made = transformers.AutoModelForCausalLM.from_config(
                their_config(config), dtype=torch.bfloat16, attn_implementation=attention
            )
        self.model: Any = made.eval()

    def _settings(self, eos_token_id: int | None) -> Any:
        import transformers

        return transformers.GenerationConfig(
            do_sample=False, eos_token_id=eos_token_id, pad_token_id=0, max_new_tokens=self.load.output
        )

    def batching(self, prompts: list[list[int]]) -> int:
        """Answer by continuous batching; returns the number of tokens made."""
        config = self._batching_config()
        extra: dict[str, Any] = {} if config is None else {"continuous_batching_config": config}
        if "persistent_manager" in signature(self.model.generate_batch).parameters:
            extra["persistent_manager"] = True  # else every call captures its graphs again
        settings = self._settings(eos_token_id=-1)
        found = self.model.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False, **extra)
        return sum(len(one.generated_tokens) for one in found.values())

    def _batching_config(self) -> Any:
        """Blocks for the load and some more, where this version has such a setting; else it takes what it wants."""
        try:
            Config: Any = import_module("transformers.generation.configuration_utils").ContinuousBatchingConfig
        except AttributeError:
            return None
        known = {field.name for field in fields(Config)}
        size = 256
        blocks = self.load.sequences * -(-(self.load.prompt + self.load.output) // size) + 16
        wanted = {"num_blocks": blocks, "page_size" if "page_size" in known else "block_size": size}
        wanted |= {"max_batch_tokens": 2048, "allow_block_sharing": False}
        return Config(**{name: value for name, value in wanted.items() if name in known})

    def close(self) -> None:
        """Free what continuous batching holds on the card."""
        if destroy := getattr(self.model, "destroy_cached_continuous_batching_manager", None):
            destroy()

    def generate(self, prompts: list[list[int]]) -> int:
        """Answer in one static batch; returns the number of tokens made."""
        ids = torch.tensor(prompts, device=self.device)
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=self._settings(None))
        return out.numel() - ids.numel()


def take_turn(card: Card, engine: Answers, load: Load, vocab: int, seed: int) -> dict[str, float]:
    """Answer the load once. Raises RuntimeError if tokens are missing."""
    prompts = random_prompts(vocab, load.sequences, load.prompt, seed)
    card.wait()
    began = time.perf_counter()
    made = engine(prompts)
    card.wait()
    seconds = time.perf_counter() - began
    if made != load.sequences * load.output:
        raise RuntimeError(f"{made} tokens were made, not {load.sequences * load.output}")
    total = made + load.sequences * load.prompt
    return {"seconds": seconds, "output_per_second": made / seconds, "total_per_second": total / seconds}


def compare(bench: Bench, card: Card, options: Any, name: str, load: Load, rounds: int) -> None:
    """All engines on one model; an engine that fails is named, with its error, and the others go on."""
    config = MODELS[name]
    kv_bytes = int(load.entries * 1.1) * config.num_layers * 4 * config.num_kv_heads * config.head_dim
    bench.say(f"{name}: loading")
    scheduler = SchedulerConfig(options.step_tokens, max_running=load.sequences)
    llm = open_llm(name, options.backend, options.device, kv_bytes, scheduler, options.weights)
    params = SamplingParams(max_tokens=load.output, ignore_eos=True)

    def ours(prompts: list[list[int]]) -> int:
        return sum(len(answer.tokens) for answer in llm.generate(prompts, params))

    engines: dict[str, Answers] = {OURS: ours}
    theirs: Transformers | None = None
    if not options.ours_only:
        theirs = Transformers(config, options.device, options.attention, load)
        engines |= {BATCHING: theirs.batching, GENERATE: theirs.generate}
    for number in range(-1, rounds):  # round -1 compiles, and warms up
        for engine in list(engines) if number % 2 == 0 else list(reversed(engines)):
            failed = any(one.get("model") == name and one.get("engine") == engine and "failure" in one
                         for one in bench.cases)  # fmt: skip
            if failed or (bench.over and number > 0):
                continue
            bench.say(f"{name}: {engine}, round {number + 1}")
            with bench.guarded(model=name, engine=engine):
                figures = take_turn(card, engines[engine], load, config.vocab_size, number + 1)
                if number >= 0:
                    bench.add(model=name, engine=engine, round=number, **figures)
    if theirs is not None:
        bench.facts["attention"] = getattr(theirs.model.config, "_attn_implementation", None)
        theirs.close()
    llm.close()


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    rows: list[tuple[object, ...]] = []
    for model in dict.fromkeys(one["model"] for one in found):
        mine = [one for one in found if one["model"] == model]
        medians = {
            engine: {key: median(one[key] for one in mine if one["engine"] == engine and key in one)
                     for key in ("seconds", "output_per_second", "total_per_second")}
            for engine in dict.fromkeys(one["engine"] for one in mine if "seconds" in one)
        }  # fmt: skip
        for engine, one in medians.items():
            ours = medians.get(OURS)
            ratio = f"{ours['output_per_second'] / one['output_per_second']:.2f}" if ours and engine != OURS else ""
            rows.append((model, engine, *one.values(), ratio))
    head = ("model", "engine", "s", "output tokens/s", "all tokens/s", "ours / theirs")
    return markdown(head, rows)


def main() -> None:
    made = parser("peer", __doc__ or "", ["llama-3.1-8b"])
    made.add_argument("--sequences", type=int, default=Load.sequences)
    made.add_argument("--prompt", type=int, default=Load.prompt, help="tokens of each (default 512)")
    made.add_argument("--output", type=int, default=Load.output, help="tokens of each (default 128)")
    made.add_argument("--step-tokens", type=int, default=2048, help="our token budget of a step (default 2048)")
    made.add_argument("--attention", default="sdpa", help="transformers' attn_implementation (default sdpa)")
    made.add_argument("--ours-only", action="store_true")
    options = made.parse_args()
    bench, card = Bench("peer", options, DEFINITIONS), Card(options.device)
    load = Load(options.sequences, options.prompt, options.output)
    for name in options.models:
        if bench.over:
            break
        with bench.guarded(model=name, engine="all"):
            compare(bench, card, options, name, load, 1 if options.quick else 3)
        gc.collect()
    title = f"{load.sequences} x ({load.prompt} + {load.output}) tokens, bf16, attention {bench.facts.get('attention')}"
    bench.show(title, *table(bench.cases))


if __name__ == "__main__":
    main()
