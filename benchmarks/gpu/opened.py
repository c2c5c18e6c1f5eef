"""An `LLM` with random weights, and prompts for it."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.gpu.models import MODELS
from benchmarks.gpu.weights import RandomWeights
from twostroke.api.llm import LLM
from twostroke.engine.scheduler import SchedulerConfig


def open_llm(
    name: str, backend: str, device: str, kv_bytes: int, scheduler: SchedulerConfig, weights: str = "BF16"
) -> LLM:
    """A model of `MODELS` in bfloat16, without a prefix index."""
    made = RandomWeights(MODELS[name], weights)
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), MODELS[name].vocab_size)
        return LLM(
            made.checkpoint(name, Path(folder)),
            backend=backend,
            device=device,
            dtype="bfloat16" if backend == "reference" else "auto",
            kv_bytes=kv_bytes,
            prefix_index="off",
            max_step_tokens=scheduler.max_step_tokens,
            max_running=scheduler.max_running,
            itl_ms=scheduler.itl_ms,
        )


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A byte-level tokenizer whose other ids are words, so that every id that a model samples has a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"Ġword{i}" for i in range(vocab_size - len(alphabet)))]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({}))


def random_prompts(config_vocab: int, count: int, tokens: int, seed: int) -> list[list[int]]:
    """`count` prompts of `tokens` random ids each."""
    return np.random.default_rng(seed).integers(0, config_vocab, (count, tokens)).tolist()
