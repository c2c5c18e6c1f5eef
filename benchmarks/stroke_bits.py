"""Which stroke deserves the bits? KL to the best, by weights of prefill x weights of decode x bits of K and V.

    python -m benchmarks.stroke_bits --model qwen2.5-coder-0.5b

One model in several weights reads and continues the same texts: Wikipedia's articles one after another. One of them
prefills the beginning, another enters the rest behind its KV, as OverFill's student would (Kim et al. 2025,
arXiv:2508.08446). Distances are those before each token of the rest but the first, whose logits are the prefill's.
What this cannot see: answers that drift apart, and retrieval.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, product
from typing import Any

import numpy as np

from benchmarks.distances import interval, result, texts
from benchmarks.results_file import save
from benchmarks.terminal import command_line, say
from twostroke.api.llm import LLM
from twostroke.api.open_engine import MAIN
from twostroke.engine.strokes import Prefill, Program
from twostroke.study.evaluate.measures.divergence import compare

ROLES = (MAIN, "student", "draft")  # from the most bits to the fewest
KV = ("bfloat16", "int8", "k8v4")  # the first is the best
DEFINITIONS = {
    "kl": "mean over texts, of the mean over the tokens of the rest, of KL(best || cell) before each, in nats; best: "
    "the first weights in both strokes, and bfloat16 KV",
    "surprise": "of the texts' own tokens there, nats a token, less the best's",
    "decode_less_prefill": "for weights A better than B: KL of (prefill A, decode B) - KL of (prefill B, decode A), "
    "paired by text; above 0, decode deserves the better weights",
    "interval": "[mean, low, high]: 95%, bootstrap over texts",
}
Cell = tuple[str, str, str]  # KV, weights of prefill, weights of decode


def continued(llm: LLM, ids: Sequence[int], context: int, weights: Sequence[str]) -> dict[tuple[str, str], np.ndarray]:
    """[rest - 1, vocab] logits for each pair of (prefill, decode) weights, before tokens context + 1 and later."""
    roles = dict(zip(weights, ROLES, strict=False))

    def program() -> Program:
        found: dict[tuple[str, str], np.ndarray] = {}
        for first in weights:
            kv = yield Prefill(ids[:context], model=roles[first], logits="none")
            for second in weights:
                found[first, second] = (yield Prefill(ids[context:-1], kv, roles[second], "all")).logits
        return found

    return result(llm, program)


def rows(each: dict[Cell, np.ndarray], weights: Sequence[str]) -> list[dict[str, Any]]:
    """`each`: for each cell surprise and KL of each text, [texts, 2]."""
    best = each[KV[0], weights[0], weights[0]]
    made: list[dict[str, Any]] = [
        {"kv": kv, "prefill": first, "decode": second, "kl": interval(one[:, 1]),
         "surprise": interval(one[:, 0] - best[:, 0])}
        for (kv, first, second), one in each.items()
    ]  # fmt: skip
    for i, worse in enumerate(weights[1:], 1):
        for better in weights[:i]:
            less = each[KV[0], better, worse][:, 1] - each[KV[0], worse, better][:, 1]
            made.append({"better": better, "worse": worse, "decode_less_prefill": interval(less)})
    return made


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="stored,int3,int2", help="two or three, from the most bits on")
    parser.add_argument("--context", type=int, default=512, help="tokens that are prefilled (default 512)")
    parser.add_argument("--length", type=int, default=64, help="tokens behind them (default 64)")
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--kv", default=",".join(KV), help="bfloat16 first")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    weights, each = options.weights.split(","), dict[Cell, np.ndarray]()
    if not 2 <= len(weights) <= len(ROLES) or not options.kv.startswith(KV[0]) or options.texts < 1:
        parser.error(f"two or three --weights, {KV[0]} first in --kv, and at least one of --texts")
    exact: list[np.ndarray] = []
    for kv in options.kv.split(","):
        companions = dict(zip(ROLES[1:], weights[1:], strict=False))
        with LLM(options.model, weights=weights[0], kv_dtype=kv, kv_bytes=1 << 28, prefix_index="off",
                 threads=options.threads, **companions) as llm:  # fmt: skip
            pieces = list(islice(texts(llm.tokenizer, options.context + options.length), options.texts))
            found: dict[Cell, list[np.ndarray]] = {(kv, *pair): [] for pair in product(weights, repeat=2)}
            for i, ids in enumerate(pieces):
                cells = continued(llm, ids[:-1], options.context, weights)
                exact += [cells[weights[0], weights[0]]] if kv == KV[0] else []
                for pair, logits in cells.items():
                    surprise, kl, _ = compare(exact[i], logits, ids[options.context + 1 : -1]).mean(-1)
                    found[kv, *pair].append(np.array([surprise, kl]))
                say(f"{kv}: {i + 1} of {len(pieces)}")
            each |= {cell: np.stack(ones) for cell, ones in found.items()}
    made = rows(each, weights)
    for row in made:
        print(row, flush=True)
    facts = {key: getattr(options, key) for key in ("context", "length", "texts", "threads")} | {"rows": made}
    say(save("stroke-bits", DEFINITIONS, options.model, facts))


if __name__ == "__main__":
    main()
