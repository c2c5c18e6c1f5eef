"""The table in docs/families.md: `python -m tests.models.families_table` measures all families, and writes it.

Tests hold each family to its row: differences are at most the stated ones, and the other columns are made again.
"""

import math
import tempfile
from pathlib import Path

import numpy as np

from tests.models import llama_cpp
from tests.models.checkpoints.test_families_in_gguf import CONVERTED
from tests.models.test_against_llama_cpp import differences, quantized_differences
from tests.models.test_against_transformers import (
    LONG,
    LONG_SIZES,
    PAGE,
    SHORT,
    Differences,
    Stated,
    all_logits,
    expected_logits,
    stated,
    tokens,
)
from tests.tiny import FAMILIES, write_model
from twostroke.api.llm import LLM
from twostroke.backends.triton.backend import unsupported
from twostroke.models.checkpoints.huggingface.directory import open_huggingface
from twostroke.models.config import Experts, ModelConfig

HEADER = (
    "| tiny model | transformers | GGUF | sizes | 1 to 600 tokens | 3,000 tokens | to llama.cpp | its five types "
    "| backends |"
)


def row_of(family: str, config: ModelConfig, found: Stated) -> str:
    """A line of the table."""
    archs = list(dict.fromkeys(made.arch for name, made in CONVERTED.items() if name.partition(",")[0] == family))
    lacking = unsupported(config, {})
    backends = "reference, native" + (", Triton" if lacking is None else "; not Triton: " + lacking.removeprefix("it "))
    cells = (f"`{family}`", FAMILIES[family][0], ", ".join(archs) or "not tried", sizes_of(config))
    short, long = found.transformers
    peer = ", ".join(f"{one:.0e}" for one in found.llama_cpp)
    return f"| {' | '.join(cells)} | {short:.0e} | {long:.0e} | {peer} | {found.quantized:.0e} | {backends} |"


def sizes_of(config: ModelConfig) -> str:
    """What the tiny model has, in words."""
    kinds = {f"{one.num_heads}/{one.num_kv_heads} of {one.head_dim}": one.latent for one in config.attentions}
    heads = " and ".join(shape + (" (latent entries)" if latent else "") for shape, latent in kinds.items())
    recurrent = [type(one).__name__ for one in config.state_layers.values()]
    kinds = f", {len(recurrent)} of them {recurrent[0]}" if recurrent else ""
    windows = {window for window in config.windows if window is not None}
    experts = {f", {mlp.count} experts" for layer in config.layers if isinstance(mlp := layer.feed_forward, Experts)}
    seen = "".join(f", window {one}" for one in windows)
    return f"{config.num_layers} layers{kinds}; heads {heads}{seen}{''.join(experts)}"


def difference(directory: Path, count: int) -> float:
    """The largest difference of the logits of a random text of `count` tokens."""
    llm = LLM(str(directory), backend="reference", threads=1, kv_bytes=64 << 20)
    ids = tokens(count, llm.config.vocab_size, seed=count)
    return float(np.abs(all_logits(llm, ids) - expected_logits(directory, ids)).max())


def rounded_up(measured: float) -> float:
    """Twice as much, as processors round differently, and then the next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(2 * max(measured, 1e-7)))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= 2 * measured)


def measured_row(family: str, room: Path) -> str:
    """A family's line, measured now."""
    short, long = write_model(family, room / family), write_model(family, room / f"{family}-long", **LONG_SIZES)
    most = max(difference(short, count) for count in SHORT)
    found = Differences(rounded_up(most), rounded_up(max(most, difference(long, LONG))))
    if llama_cpp.missing() is None:
        *few, many = differences(family, room / f"{family}-llama.cpp")
        peer = Differences(rounded_up(max(few)), rounded_up(max(*few, many)))
        quantized = rounded_up(max(quantized_differences(family, room / f"{family}-quantized").values()))
    else:
        _, peer, quantized = stated(PAGE.read_text())[family]
    return row_of(family, open_huggingface(short).config, Stated(found, peer, quantized))


def main() -> None:
    before = PAGE.read_text().partition("| tiny model |")[0]
    with tempfile.TemporaryDirectory() as room:
        rows = [measured_row(family, Path(room)) for family in FAMILIES]
    PAGE.write_text("\n".join([before + HEADER, "|---" * HEADER.count(" | ") + "|---|", *rows]) + "\n")


if __name__ == "__main__":
    main()
