"""A teacher that does not fit prefills for a student that does: peak memory and times under a limit.

    python -m benchmarks.streamed_teacher

Teacher and student have the shapes of a 7B (Mistral's) and of a 1.5B with the same heads of K and V, and random weights
in bfloat16. They are written into a temporary directory (18 GB), which is deleted at the end. A process that may have
--limit of memory of its own (RLIMIT_DATA: its heap and mapped memory, not pages of files) opens them with
--stream-weights and answers once; then another tries it with the teacher in memory. Random weights say nothing about
answers: that they are those of a teacher in memory is what tests/engine/test_streamed.py shows.
"""

from __future__ import annotations

import argparse
import json
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from ml_dtypes import bfloat16
from tokenizers import decoders, models, pre_tokenizers, trainers

from benchmarks.results_file import save
from benchmarks.terminal import command_line, say
from twostroke.api.llm import LLM
from twostroke.cli.parsers import parse_size
from twostroke.methods import method

DEFINITIONS = {
    "peak_rss_bytes": "ru_maxrss of the process: pages of files that it had mapped and not yet given back included",
    "ttft_s": "of the first answer: arrival to first token, the teacher's layers read and packed included",
    "itl_s": "mean gap between the tokens of the answer, by the student",
    "open_s": "until the models were open",
    "error": "how the process ended, where it did not answer",
}


@dataclass(frozen=True)
class Shape:
    """Of a Llama; heads of K and V and layers are those that both models have."""

    hidden: int
    heads: int
    mlp: int
    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 32_000

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of a layer's tensors, after "model.layers.N."."""
        width, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for name, rows in (("q", width), ("k", kv), ("v", kv)):
            yield f"self_attn.{name}_proj", (rows, self.hidden)
        yield "self_attn.o_proj", (self.hidden, width)
        yield from ((f"mlp.{name}_proj", (self.mlp, self.hidden)) for name in ("gate", "up"))
        yield "mlp.down_proj", (self.hidden, self.mlp)
        yield from ((name, (self.hidden,)) for name in ("input_layernorm", "post_attention_layernorm"))


TEACHER = Shape(hidden=4096, heads=32, mlp=14_336)
STUDENT = Shape(hidden=2048, heads=16, mlp=5_632)


def write_model(shape: Shape, directory: Path) -> int:
    """Random weights in bfloat16, a file for each layer; returns their bytes."""
    directory.mkdir(parents=True)
    random = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
    names: dict[str, str] = {}
    total = 0

    def write(file: str, tensors: dict[str, tuple[int, ...]]) -> None:
        nonlocal total
        at, header = 0, dict[str, Any]()
        for name, size in tensors.items():
            header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [at, at := at + 2 * prod(size)]}
        head = json.dumps(header).encode()
        with (directory / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(head)) + head)
            for size in tensors.values():
                scale = size[-1] ** -0.5 if len(size) > 1 else 0.1
                values = np.asarray(random * scale + (len(size) == 1)).astype(bfloat16)
                stream.write(np.resize(values, prod(size)).tobytes())
        names.update(dict.fromkeys(tensors, file))
        total += at

    table = (shape.vocab, shape.hidden)
    write("outer.safetensors", {"model.embed_tokens.weight": table, "lm_head.weight": table,
                                "model.norm.weight": (shape.hidden,)})  # fmt: skip
    for i in range(shape.layers):
        write(f"layer-{i}.safetensors", {f"model.layers.{i}.{name}.weight": size for name, size in shape.tensors()})
    index = {"metadata": {"total_size": total}, "weight_map": names}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "vocab_size": shape.vocab,
        "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=258, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["a"], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return total


def answer(
    teacher: Path, student: str, tokens: int, streamed: bool, limit: int | None, threads: int | None
) -> dict[str, Any]:
    """One answer of 16 tokens by the student behind the teacher's prefill, and what it took. Limits this process."""
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    began = time.monotonic()
    with LLM(str(teacher), student=student, stream_weights=streamed, kv_bytes=512 << 20, prefix_index="off",
             max_step_tokens=tokens, threads=threads, backend="native") as llm:  # fmt: skip
        opened = time.monotonic() - began
        prompt = np.random.default_rng(1).integers(2, 250, tokens).tolist()
        (made,) = llm.generate([prompt], max_tokens=16, ignore_eos=True, method=method("overfill"))
    times = [made.timings.arrival or 0.0, *made.timings.tokens]
    return {
        "open_s": opened,
        "ttft_s": times[1] - times[0],
        "itl_s": (times[-1] - times[1]) / (len(times) - 2),
        "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def in_process(options: argparse.Namespace, home: str, *words: str) -> dict[str, Any]:
    """What another process prints in its last line, or how it ended."""
    given = [f"--limit={options.limit}", f"--tokens={options.tokens}", f"--student-weights={options.student_weights}"]
    given += [] if options.threads is None else [f"--threads={options.threads}"]
    command = [sys.executable, "-m", "benchmarks.streamed_teacher", f"--child={home}", *given, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1].replace(f"{home}/", "")
        return {"error": f"ended with {done.returncode}: {last[:200]}"}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--limit", type=parse_size, default=4 << 30, help="memory of a process (default 4GiB)")
    parser.add_argument("--tokens", type=int, default=512, help="of the prompt, in one pass (default 512)")
    parser.add_argument("--student-weights", default="int8", help="as in --student (default int8)")
    parser.add_argument("--layers", type=int, default=TEACHER.layers, help="of both models (default 32)")
    parser.add_argument("--directory", type=Path, help="where the temporary directory is made")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--resident", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        student = f"{options.child / 'student'}@{options.student_weights}"
        print(json.dumps(answer(options.child / "teacher", student, options.tokens, not options.resident,
                                options.limit, options.threads)))  # fmt: skip
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as home:
        shapes = {"teacher": TEACHER, "student": STUDENT}
        sizes = {
            f"{name}_bytes": write_model(replace(shape, layers=options.layers), Path(home) / name)
            for name, shape in shapes.items()
        }
        say(sizes)
        facts: dict[str, Any] = sizes | {"limit_bytes": options.limit, "tokens": options.tokens}
        facts["streamed"] = in_process(options, home)
        say(facts["streamed"])
        facts["resident"] = in_process(options, home, "--resident")
    print(json.dumps(facts, indent=1))
    say(save("streamed-teacher", DEFINITIONS, f"7b, {options.layers} layers", facts))


if __name__ == "__main__":
    main()
