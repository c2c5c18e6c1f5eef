"""The quality of number formats: perplexity on real text, and the distance to float32.

    python -m benchmarks.quality --model smollm2-135m

Every setting of a model reads the same windows of Wikipedia, each the beginning of another article. The baseline is the
PyTorch reference in float32 with the checkpoint's weights. The catalog's checkpoints have 4- to 8-bit weights and no
others are available, so re-encoded weights are made from the dequantized ones with their channels shuffled. The figures
show the loss that re-encoding adds to the checkpoint's own.

Settings are opened one after another, and the baseline's logits are kept in a temporary file: 2.5 GB for 4,096 tokens
with a vocabulary of 152,000. Results go to benchmarks/results, one file per day; a model measured again replaces its
earlier results of the day.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from benchmarks.distances import distance, result
from benchmarks.results_file import RESULTS, save
from benchmarks.shuffled import shuffled
from benchmarks.terminal import command_line, markdown, say
from twostroke.api.llm import LLM
from twostroke.engine.strokes import Prefill, Program
from twostroke.errors import InvalidRequest
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.quantize import quantize
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.study.evaluate.measures.divergence import compare
from twostroke.study.evaluate.wikipedia import SOURCE, articles

DEFINITIONS = {
    "text": f"{SOURCE.description}; {SOURCE.licence}; package {SOURCE.packages[0]}",
    "perplexity": "exp of the mean of -log p of the token that follows in the text",
    "kl": "mean over tokens of KL(baseline || setting) of the next token, in nats",
    "kl_interval": "95%, bootstrap over windows: tokens of one window are not independent",
    "top1": "share of tokens after which the baseline and the setting have the same likeliest next token",
    "weight_bytes": "of all matrices in their formats; the reference dequantizes them",
}


@dataclass(frozen=True)
class Setting:
    """A backend, number type and weight format."""

    backend: str
    dtype: str
    weights: str = "stored"

    def checkpoint(self, model: str) -> Checkpoint:
        found = open_checkpoint(model)
        return found if self.weights == "stored" else shuffled(found)

    def open(self, model: str) -> LLM:
        return LLM(self.checkpoint(model), kv_bytes=1 << 26, prefix_index="off", **asdict(self))

    def weight_bytes(self, model: str) -> int:
        return sum(tensor.nbytes for tensor in quantize(self.checkpoint(model), self.weights).matrices().values())


BASELINE = Setting("reference", "float32")
WEIGHTS = ("stored", "bf16", "int8", "int4")
STORED = (BASELINE, Setting("reference", "bfloat16"), Setting("native", "float32"))
ENCODED = tuple(Setting(backend, "float32", weights) for weights in WEIGHTS[1:] for backend in ("reference", "native"))
SETTINGS = STORED + ENCODED
MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "gemma3-270m")


def windows(tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """The first `length` + 1 tokens of `count` articles, including the tokenizer's BOS if it has one."""
    starts = (tokenizer.encode(article[: 16 * length])[: length + 1] for article in articles())
    return list(islice((ids for ids in starts if len(ids) > length), count))


def logits(llm: LLM, ids: Sequence[int]) -> np.ndarray:
    """[len(ids), vocab] float32."""

    def program() -> Program:
        return (yield Prefill(ids, logits="all"))

    return result(llm, program).logits


def read(setting: Setting, model: str, texts: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
    """Logits at every token except the last of each text; the model is closed afterwards."""
    llm = setting.open(model)
    for ids in texts:
        yield logits(llm, ids[:-1])


def measure(model: str, settings: Sequence[Setting], count: int, length: int) -> dict[str, Any]:
    """Results for settings of a model, over `count` windows of `length` tokens."""
    checkpoint = open_checkpoint(model)
    texts = windows(Tokenizer.from_source(checkpoint.tokenizer_source), count, length)
    rows: list[dict[str, Any]] = []
    with TemporaryFile(dir=RESULTS) as file:
        shape = (len(texts), length, checkpoint.config.vocab_size)
        baseline = np.memmap(file, np.float32, "w+", shape=shape)
        for kept, found in zip(baseline, read(BASELINE, model, texts), strict=True):
            kept[:] = found
        for setting in settings:
            found = baseline if setting == BASELINE else read(setting, model, texts)
            try:
                each = [compare(p, q, ids[1:]) for p, q, ids in zip(baseline, found, texts, strict=True)]
            except InvalidRequest as error:
                say(f"{model}, {setting}: left out, {error}")
                continue
            perplexity = float(np.exp(np.stack(each)[:, 0].mean()))
            sizes = {"weight_bytes": setting.weight_bytes(model), "perplexity": perplexity}
            rows.append(asdict(setting) | sizes | distance(each))
    return {"windows": len(texts), "tokens": len(texts) * length, "settings": rows}


def table(model: str, facts: dict[str, Any]) -> str:
    """A Markdown table."""
    rows: list[list[str]] = []
    for one in facts["settings"]:
        low, high = one["kl_interval"]
        form = [one["backend"], one["dtype"], one["weights"], f"{one['weight_bytes'] / 1e6:.0f}"]
        kl = f"{one['kl']:.2g} ({low:.2g} to {high:.2g})"
        rows.append([*form, f"{one['perplexity']:.3f}", kl, f"{one['top1']:.1%}"])
    columns = ("backend", "dtype", "weights", "MB", "perplexity", "KL to float32, nats (95%)", "top-1 equal")
    title = f"{model}: {facts['tokens']:,} tokens in {facts['windows']} windows"
    return f"{title}\n\n{markdown(columns, rows, words=3)}\n"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, help="may be repeated; all if none is given")
    parser.add_argument("--weights", action="append", choices=WEIGHTS, help="may be repeated; all if none is given")
    parser.add_argument("--windows", type=int, default=32, help="articles to read (default 32, 85 at most)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each article (default 256)")
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    settings = [setting for setting in SETTINGS if setting.weights in (options.weights or WEIGHTS)]
    for model in options.model or MODELS:
        facts = measure(model, settings, options.windows, options.tokens)
        print(table(model, facts), flush=True)
        say(save("quality", DEFINITIONS, model, facts))


if __name__ == "__main__":
    main()
