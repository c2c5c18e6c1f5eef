"""Recurrent layers: states in chunks beside the plain recurrence, and a conversation that computes only what is new.

    python -m benchmarks.hybrid

The shape is that of Qwen3.5 0.8B with random weights (24 layers, 18 of them with states of 16 heads of 128 by 128), and
another model's tokenizer. Both recurrences are made of the same vector kernels, and compute the same rows on one
thread: in the mean over all layers with a state, in turn, medians of rounds. The plain one keeps only the state behind
the last token, so it reads and writes all of it for every token, and cannot be cut back.
"""

from __future__ import annotations

import ctypes
import runpy
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np

from benchmarks.gpu.weights import RandomWeights
from benchmarks.results_file import save
from benchmarks.terminal import command_line, say
from twostroke.api.completion import Completion
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.backends.native.backend import NativeBackend
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.models.config import Attention, GatedMLP, Layer, ModelConfig
from twostroke.models.recurrent import GatedDeltaNet, RecurrentMixer
from twostroke.models.rope import Rope
from twostroke.sampling.params import SamplingParams
from twostroke.system.scratch import address

TOKENIZER = "smollm2-135m"
PREFILL, DECODE = 512, 70  # rows
TURNS, TURN_TOKENS, ANSWER = 20, 1450, 50
KV_BYTES = 2 << 30
DEFINITIONS = {
    "chunked_us, plain_us": "of all layers with a state together, one thread, for these rows",
    "open": "rows since the snapshot, before the step; its token is one more",
    "difference": "largest, of what both make for a prefill from the first token on, over its root mean square",
    "turns": "a conversation: tokens of the prompt, those computed, and seconds to the first token; the last is asked "
    "once more, without what was known",
    "value": "bytes of a value: K and V, snapshots, and rows since the last of them",
}


class Decaying(RandomWeights):
    """Random weights whose states forget."""

    def _small(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        made = super()._small(name, shape)
        return np.abs(made) + np.float32(0.01) if name.endswith("decay") else made


def hybrid(layers: int = 24) -> Checkpoint:
    """A checkpoint of the shape, with weights of 8 bits."""
    attention = Attention(8, 2, 256, scale=256**-0.5, rope=Rope(1e7, rotated=64), qk_norm=True, output_gate=True)
    state = GatedDeltaNet(conv_width=4, chunk=64, num_k_heads=16, num_v_heads=16, k_dim=128, v_dim=128)
    each = [Layer(attention if i % 4 == 3 else state, GatedMLP(3584)) for i in range(layers)]
    known = open_checkpoint(TOKENIZER)
    config = ModelConfig("qwen3_5", known.config.vocab_size, 1024, 262144, 1e-6, tuple(each), tied=True)
    weights = Decaying(config, "Q8_0")
    stored = {name: weights(name) for name in weights.shapes}
    return replace(known, name="hybrid-0.8b", config=config, stored=stored, transforms={}, encoders={})


def compiled(variant: str, directory: Path) -> Path:
    """The kernels of a variant with `recurrence.cpp`."""
    made, native = directory / "recurrence.so", Path("native")
    flags = runpy.run_path("setup.py")
    sources = runpy.run_path(flags["DIGEST"])["digest"](native, variant)
    options = [*flags["FLAGS"], *flags["VARIANTS"][variant], f"-DSOURCES={sources:#x}", f"-I{native}"]
    command = ["g++", *options, "-shared", "-fPIC", "-w", "benchmarks/native/recurrence.cpp", "-o", str(made)]
    subprocess.run(command, check=True)
    return made


class Recurrences:
    """Times both recurrences over the batch of every step of a model that it is told to."""

    def __init__(self, llm: LLM, rounds: int) -> None:
        assert isinstance(llm.backend, NativeBackend)
        self._library, self._rounds = llm.backend.team.library, rounds
        states = [one for one in llm.config.state_layers.values() if isinstance(one, RecurrentMixer)]
        self._states = np.zeros(sum(one.state_values for one in states), np.float32)
        self._forward: Any = self._library.twostroke_forward
        self.found: list[dict[str, Any]] = []
        self.timing = False
        setattr(self._library, "twostroke_forward", self._step)  # noqa: B010 - what a model calls

    def _step(self, *places: Any) -> int:
        status = cast("int", self._forward(*places))
        if not self.timing:
            return status
        model, batch, kv, strides, _ = places
        ns, difference = (ctypes.c_int64 * 2)(), ctypes.c_double()
        times: list[tuple[int, int]] = []
        for _ in range(self._rounds + 1):
            self._states[:] = 0
            self._library.twostroke_time_states(
                ctypes.c_void_p(model), batch, ctypes.c_void_p(kv), strides, ctypes.c_void_p(address(self._states)),
                ns, ctypes.byref(difference),
            )  # fmt: skip
            times.append((ns[0], ns[1]))
        fields = batch._obj
        chunked, plain = (median(each) / 1e3 for each in zip(*times[1:], strict=True))
        open_rows = ctypes.c_int32.from_address(fields.state_counts).value
        self.found.append({"rows": fields.num_rows, "open": open_rows, "chunked_us": chunked, "plain_us": plain,
                           "difference": difference.value})  # fmt: skip
        return status


def recurrences(llm: LLM, rounds: int) -> dict[str, Any]:
    """Both for a prefill, and for decode at every number of open rows."""
    timed, tokens = Recurrences(llm, rounds), [(7 * i * i + 3 * i) % 40_000 for i in range(PREFILL)]
    timed.timing = True
    kv = llm.prefill(tokens)
    (prefill,) = timed.found
    del timed.found[:]
    for _ in llm.decode(kv, max_tokens=DECODE, ignore_eos=True):
        pass
    timed.timing = False
    by_open = {one["open"]: one for one in timed.found}
    return {"prefill": prefill, "decode": [by_open[count] for count in sorted(by_open)]}


def value(llm: LLM, length: int) -> dict[str, Any]:
    """What a value of so many tokens holds."""
    kv = llm.prefill([(11 * i) % 40_000 for i in range(length)])
    state = next(iter(llm.config.state_layers.values()))
    layers = len(llm.config.state_layers)
    return {"tokens": length, "bytes": kv.nbytes, "snapshot": layers * 4 * state.snapshot_values,
            "row": layers * 2 * (state.row_values + state.conv_size),
            "kv_token": sum(4 * one.num_kv_heads * one.head_dim for one in llm.config.attentions)}  # fmt: skip


def conversation(llm: LLM, turns: int) -> Iterator[dict[str, Any]]:
    """Turns of a conversation: each prompt is all of it so far and something new. The last is asked cold at the end."""
    rng, prompt, answer = np.random.default_rng(0), list[int](), list[int]()
    for turn in range(turns):
        prompt += [*answer, *rng.integers(0, 40_000, TURN_TOKENS).tolist()]
        (found,) = llm.generate([prompt], max_tokens=ANSWER, ignore_eos=True)
        answer = [token.id for token in found.tokens]
        yield {"turn": turn + 1} | _asked(found)
    request = llm.request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    request.cache_salt = b"cold"
    llm.engine.run([request])
    cold = Completion.of(request, request.events)
    assert [token.id for token in cold.tokens] == answer[:1], "a hit is what computing gives"
    yield {"turn": "the last, cold"} | _asked(cold)


def _asked(answer: Completion) -> dict[str, Any]:
    computed = answer.prompt_tokens - answer.cached_tokens
    return {"prompt": answer.prompt_tokens, "computed": computed, "ttft_s": answer.timings.ttft}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each timing (default 5)")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"of the conversation (default {TURNS})")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    checkpoint, facts = hybrid(options.layers), dict[str, Any]()
    variant = library.variants()[0]
    with tempfile.TemporaryDirectory() as directory:
        library.use(variant, compiled(variant, Path(directory)))
        library.load.cache_clear()
        with LLM(checkpoint, kv_bytes=KV_BYTES, threads=options.threads) as llm:
            facts |= {"variant": variant, "threads": llm.backend.threads, "value": value(llm, PREFILL)}
            print(facts, flush=True)
            facts["turns"] = list(conversation(llm, options.turns))
            for turn in facts["turns"]:
                print(turn, flush=True)
            facts |= recurrences(llm, options.rounds)
            for row in (facts["prefill"], *facts["decode"]):
                print(row, flush=True)
    say(save("hybrid", DEFINITIONS, checkpoint.name, facts))


if __name__ == "__main__":
    main()
