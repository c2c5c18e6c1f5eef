"""K and V in fewer bits: the distance to bfloat16 by length of the text, and the time of a decode step behind it.

    python -m benchmarks.kv_bits --model qwen2.5-coder-0.5b

Both settings have the same weights, kernels and texts: Wikipedia's articles one after another, each text another piece.
Distances are of the last tokens of a text, where the most entries are read. Prefills and steps are timed in turn, warm,
and their medians compared; sequences of a batch have pages of their own. What this cannot see: retrieval (a needle
among many entries), and answers that drift apart later.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.distances import distance, result, texts
from benchmarks.peer.engines import ENGINES
from benchmarks.peer.environments import WORK, ensure_environment, log_file, python, run
from benchmarks.peer.weights import ensure_weights
from benchmarks.results_file import save
from benchmarks.terminal import command_line, say
from twostroke.api.llm import LLM
from twostroke.engine.strokes import Prefill, Program
from twostroke.kv.cache import KVCache
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.sampling.params import SamplingParams
from twostroke.study.evaluate.measures.divergence import compare

BASELINE, SETTINGS = "bfloat16", ("int8", "k8v4")
PEER_TYPES = ("q8_0", "q4_0")  # of llama.cpp, for K and V
LENGTHS = (500, 2000, 8000)
LAST = 64  # tokens of a text whose distance is measured
STEPS = 16  # timed together
SHORT = 16  # tokens behind which attention takes next to no time
DEFINITIONS = {
    "kl": f"mean over the last {LAST} tokens of each text of KL(bfloat16 || setting) of the next token, in nats; of "
    "llama.cpp's types KL(its f16 || type)",
    "kl_interval": "95%, bootstrap over texts",
    "top1": "share of these tokens after which both have the same likeliest next token",
    "prefill_s": "median over rounds of the prefill of so many tokens, nothing cached; settings in turn",
    "step_ms": f"median over rounds of {STEPS} steps of so many sequences behind so many tokens; settings in turn",
    "attention_ms": f"step_ms less that behind {SHORT} tokens",
    "bytes": "of one value",
}


def last_logits(llm: LLM, ids: Sequence[int]) -> np.ndarray:
    """[LAST, vocab] float32, behind each of the last tokens of `ids`."""

    def program() -> Program:
        kv = yield Prefill(ids[:-LAST], logits="none")
        return (yield Prefill(ids[-LAST:], kv, logits="all"))

    return result(llm, program).logits


def distances(llms: dict[str, LLM], length: int, count: int) -> Iterator[dict[str, Any]]:
    """For each setting, KL of the next token to the baseline's, with its interval over texts."""
    pieces = list(islice(texts(llms[BASELINE].tokenizer, length), count))
    found: dict[str, list[np.ndarray]] = {name: [] for name in llms if name != BASELINE}
    for ids in pieces:
        exact = last_logits(llms[BASELINE], ids[:-1])
        for name in found:
            found[name].append(compare(exact, last_logits(llms[name], ids[:-1]), ids[-LAST:]))
    yield from (_row(name, length, each) for name, each in found.items())


def llama_cpp(model: str, tokenizer: Tokenizer, length: int, count: int, threads: int) -> Iterator[dict[str, Any]]:
    """The same of llama.cpp's types, to its own float16 KV, on the same texts and weights. Raises CannotSetUp."""
    engine, pieces = ENGINES["llama.cpp"], list(islice(texts(tokenizer, length), count))
    ensure_environment(engine, WORK)
    program, logits = [str(python(engine, WORK)), "-m", "benchmarks.peer.llama_cpp_logits"], dict[str, np.ndarray]()
    with tempfile.TemporaryDirectory() as directory:
        job = Path(directory) / "job"
        for kind in ("f16", *PEER_TYPES):
            asked = {"model": ensure_weights(engine, model, WORK), "type": kind, "threads": threads, "rows": LAST}
            job.write_text(json.dumps(asked | {"texts": [ids[:-1] for ids in pieces]}))
            run([*program, str(job)], log_file(WORK, "kv-bits"))
            logits[kind] = np.load(f"{job}.npy")
    for kind in PEER_TYPES:
        each = [
            compare(*rows) for rows in zip(logits["f16"], logits[kind], (ids[-LAST:] for ids in pieces), strict=True)
        ]
        yield _row(f"llama.cpp {kind}", length, each)


def _row(name: str, length: int, each: Sequence[np.ndarray]) -> dict[str, Any]:
    return {"kv_dtype": name, "length": length, "texts": len(each)} | distance(each)


def step_ms(llm: LLM, values: Sequence[KVCache]) -> float:
    """Milliseconds of a decode step of a batch; the first tokens' logits are there already."""

    def seconds(tokens: int) -> float:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        began = time.perf_counter()
        llm.engine.finish([llm.engine.submit(llm.decode_request(kv, params)) for kv in values])
        return time.perf_counter() - began

    few = seconds(2)
    return (seconds(2 + STEPS) - few) * 1e3 / STEPS


def copies(llm: LLM, kv: KVCache, count: int) -> list[KVCache]:
    """The value, and others with its entries in pages of their own."""
    with tempfile.TemporaryDirectory() as directory:
        kv.save(Path(directory) / "kv")
        return [kv, *(KVCache.load(Path(directory) / "kv", llm) for _ in range(count - 1))]


def times(llms: dict[str, LLM], length: int, sequences: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Median time of a prefill, and of a step by number of sequences, by setting."""
    pieces = list(islice(texts(llms[BASELINE].tokenizer, length), rounds + 1))
    prefills: dict[str, list[float]] = {name: [] for name in llms}
    values: dict[str, KVCache] = {}
    for ids in pieces:
        for name, llm in llms.items():
            values.pop(name, None)
            began = time.perf_counter()
            values[name] = llm.prefill(ids[:length])
            prefills[name].append(time.perf_counter() - began)
    for count in sequences:
        behind = {name: (llm.prefill(pieces[0][:SHORT]), values[name]) for name, llm in llms.items()}
        batches = {name: [copies(llms[name], kv, count) for kv in behind[name]] for name in llms}
        steps: dict[str, list[list[float]]] = {name: [] for name in llms}
        for _ in range(rounds + 1):
            for name, llm in llms.items():
                steps[name].append([step_ms(llm, batch) for batch in batches[name]])
        for name in llms:
            short, long = (median(each) for each in zip(*steps[name][1:], strict=True))
            yield {"kv_dtype": name, "length": length, "sequences": count, "prefill_s": median(prefills[name][1:]),
                   "step_ms": long, "attention_ms": long - short, "bytes": values[name].nbytes}  # fmt: skip


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--length", type=int, action="append", help=f"tokens; may be repeated (default {LENGTHS})")
    parser.add_argument("--texts", type=int, default=16, help="of each length (default 16); 0 measures no distance")
    parser.add_argument("--sequences", type=int, action="append", help="of a timed step; may be repeated (default 1)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="of timed prefills and steps (default 5); 0 times nothing"
    )
    parser.add_argument("--kv-mib", type=int, default=1024, help="of each setting's pool (default 1024)")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--llama-cpp", action="store_true", help="its types too; it is built first, which takes a while"
    )
    options = parser.parse_args()
    names, sequences = (BASELINE, *SETTINGS), options.sequences or [1]
    llms = {
        name: LLM(options.model, kv_dtype=name, kv_bytes=options.kv_mib << 20, prefix_index="off",
                  threads=options.threads)
        for name in names
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    for length in options.length or LENGTHS:
        tokenizer, threads = llms[BASELINE].tokenizer, llms[BASELINE].backend.threads
        peer = llama_cpp(options.model, tokenizer, length, options.texts, threads) if options.llama_cpp else ()
        near = distances(llms, length, options.texts) if options.texts else ()
        timed = times(llms, length, sequences, options.rounds) if options.rounds else ()
        for row in (*near, *timed, *peer):
            rows.append(row)
            print(row, flush=True)
    say(save("kv-bits", DEFINITIONS, options.model, {"threads": options.threads, "rows": rows}))


if __name__ == "__main__":
    main()
