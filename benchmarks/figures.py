"""The sources' figures derived again: `python -m benchmarks.figures` writes docs/results/figures-of-the-sources.md."""

# ruff: noqa: E501  (a paragraph of the page is one line)
import argparse
from collections.abc import Iterator
from pathlib import Path

from twostroke.models.cost import Rows
from twostroke.planning.machines import Machine, find_machine
from twostroke.planning.models import specifications
from twostroke.planning.roofline import Roofline
from twostroke.planning.specification import Specification
from twostroke.planning.weights import FORMATS

PAGE = Path(__file__).parents[1] / "docs" / "results" / "figures-of-the-sources.md"
HEAD = """# The figures of the sources, derived again

Which figures of the texts that this project was built from hold? Every number of "ours" is computed by `python -m benchmarks.figures` from sizes of models and peaks of machines (`twostroke/planning/data`). "Floor" is the larger of FLOPs at the dense peak and weight bytes at the full bandwidth: no program can be quicker.

- Source 001: "The KV Cache: How It Eliminates Redundancy", January 2026.
- Source 002: on prefill, its optimization and TTFT, for Llama 70B on A100s.
- Source 004: "Prefill in LLM Inference" and "Decode in LLM Inference", for Llama 3 70B on H100s.

**In short.** KV sizes are mostly right. Prefill times in 002 and 004 are below the floor in every row, on cards that cannot hold the weights. FLOPs are 2.8 to 12 times off, some too low and some too high.

| source | item | theirs | ours | verdict |
|---|---|--:|--:|---|
"""

Row = tuple[str, str, str, str, str]  # source, item, theirs, ours, verdict


def source_001() -> Iterator[Row]:
    """Sizes of the KV cache, and what it saves."""
    known = specifications()
    for name, theirs, verdict in (
        ("llama-2-7b", "0.5 MB; 1.0 GB", "agree, in binary units"),
        ("llama-2-13b", "0.8 MB; 1.6 GB", "agree"),
        ("llama-2-70b", "2.5 MB; 5.0 GB", "8 times too large: 8 of the 64 heads hold KV (right for LLaMA 1 65B)"),
        ("llama-1-65b", "2.5 MB; 5.0 GB", "agree, if this model was meant"),
        ("gpt-3-175b", "4.5 MB; 9.0 GB", "agree"),
    ):
        model = known[name]
        ours = f"{model.kv_bytes(1) / 2**20:.4g} MiB; {model.kv_bytes(2048) / 2**30:.4g} GiB"
        yield "001", f"KV of {name}: a token; 2,048 tokens", theirs, ours, verdict
    naive, cached = sum(range(500, 700)), 500 + 199
    yield (
        "001", "K, V computed at p = 500, g = 200", "120,000 to 700, 171 times",
        f"{naive:,} to {cached:,}, {naive / cached:.1f} times", "agree (the last token is not entered)",
    )  # fmt: skip


def source_002() -> Iterator[Row]:
    """Prefill of Llama 70B on A100s."""
    llama2, a100, bf16 = specifications()["llama-2-70b"], find_machine("a100"), FORMATS["bf16"]
    yield "002", "crossover of an A100, FLOPs a byte", "156", f"{a100.balance():.0f}", "agree, with 2.0 TB/s"
    crossover = llama2.crossover() or 0
    yield (
        "002",
        "scores overtake the rest from",
        "4,000 to 8,000",
        f"{crossover:,}",
        f"{crossover / 8000:.0f} times low",
    )
    flops = 2 * 4096 * 8192 * 28672
    size = 2 * (4096 * 8192 + 8192 * 28672 + 4096 * 28672)
    yield (
        "002", "up-projection, 4,096 rows: FLOPs; bytes; intensity", "1.93 T; 1.0 GB; 1,930",
        f"{flops / 1e12:.3f} T; {size / 1e9:.3f} GB; {flops / size:,.0f}", "bytes 1.3 times high",
    )  # fmt: skip
    for tokens, attention, scores, mlp, share in (
        (256, 0.028, 0.001, 0.060, 32), (1024, 0.110, 0.017, 0.240, 35), (4096, 0.440, 0.275, 0.960, 43),
        (8192, 0.879, 1.100, 1.920, 51), (16384, 1.759, 4.400, 3.840, 62), (32768, 3.518, 17.600, 7.680, 73),
    ):  # fmt: skip
        parts = {part: value / 80 / 1e12 for part, value in llama2.prefill_flops(tokens).items()}
        total = parts["projections"] + parts["scores"] + parts["feed-forward"]
        ours = f"{parts['projections']:.3f}; {parts['scores']:.3f}; {parts['feed-forward']:.3f}"
        percent = 100 * (total - parts["feed-forward"]) / total
        low = parts["feed-forward"] / mlp
        yield (
            "002", f"TFLOPs of a layer, {tokens:,} tokens: projections; scores (causal); FFN; attention's part",
            f"{attention}; {scores}; {mlp}; {share}%", f"{ours}; {percent:.0f}%", f"FFN {low:.1f} times low",
        )  # fmt: skip

    for tokens, ms in ((128, 45), (512, 120), (1024, 210), (2048, 390), (4096, 780), (8192, 1800), (32768, 12500)):
        least = floor(llama2, a100, tokens)
        weights = f"impossible ({least / ms:.1f} times); weights of {bf16.total(llama2) / 1e9:.0f} GB in 80"
        yield "002", f"prefill of {tokens:,} tokens on one A100, ms", f"{ms:,}", f"floor {least:,.0f}", weights
    for tokens, tera in ((128, 1.7), (512, 6.8), (1024, 13.7), (2048, 27.7), (4096, 57.5), (8192, 125), (32768, 920)):
        ours = sum(llama2.prefill_flops(tokens).values()) / 1e12
        yield (
            "002",
            f"TFLOPs of a prefill of {tokens:,} tokens",
            f"{tera:g}",
            f"{ours:,.1f}",
            f"{ours / tera:.1f} times low",
        )
    for cards, ms in ((2, 410), (4, 215), (8, 120)):
        least = floor(llama2, a100, 4096, cards)
        yield "002", f"4,096 tokens on {cards} A100, ms", str(ms), f"floor {least:,.0f}", "impossible"
    ring = Roofline(llama2, a100, bf16, 8).all_reduce_bytes(4096)
    one_way = 1e3 * ring / 300e9
    yield (
        "002", "all-reduce at TP 8: bytes; ms; of 80 layers", "117 MB; 0.2; 32",
        f"{ring / 1e6:.1f} MB; {one_way:.2f}; {160 * one_way:.0f}", "bytes agree; a link's both directions were used",
    )  # fmt: skip
    prefix = sum(llama2.prefill_flops(2000).values()) / 1e12
    yield "002", "prefix of 2,000 tokens, TFLOPs", "50", f"{prefix:.0f}", f"{prefix / 50:.1f} times low"
    least = floor(llama2, a100, 2048, 4)
    yield (
        "002", "1,520 ms to 22 ms, 69 times (2,048 tokens on 4 A100)", "22 ms", f"floor {least:.0f} ms uncached",
        "impossible; with 2,048 tokens cached nothing is left to prefill",
    )  # fmt: skip


def source_004() -> Iterator[Row]:
    """Both strokes of Llama 3 70B on H100s."""
    llama3, h100, bf16 = specifications()["llama-3-70b"], find_machine("h100"), FORMATS["bf16"]
    values = 11 * llama3.kv_values
    yield (
        "004", "KV of 11 tokens: values; bytes", "22,528,000; 43 MB",
        f"{values:,}; {2 * values / 1e6:.1f} MB", f"{22_528_000 / values:.1f} times high",
    )  # fmt: skip
    at_4k = llama3.kv_bytes(4096) / 1e9
    yield "004", "KV of 4,096 tokens; of 50 users, GB", "1.34; 67", f"{at_4k:.3f}; {50 * at_4k:.1f}", "agree"
    yield (
        "004",
        "weights, GB",
        "140",
        f"{bf16.total(llama3) / 1e9:.1f}",
        "agree; two H100 keep 19 GB beside them if nothing else is reserved",
    )
    for tokens, tera, ms in (
        (128, 0.5, 8), (512, 8, 25), (2048, 128, 85), (4096, 512, 180), (8192, 2048, 450), (32768, 32768, 3500),
    ):  # fmt: skip
        scores = llama3.attention_flops(Rows(tokens)) / 1e12
        least = floor(llama3, h100, tokens)
        yield (
            "004", f"{tokens:,} tokens on one H100: TFLOPs of attention; ms", f"{tera:g}; {ms:,}",
            f"{scores:.3f} causal, {2 * scores:.3f} full; floor {least:,.0f}",
            f"{tera / (2 * scores):.1f} times high; impossible",
        )  # fmt: skip
    for entries, theirs in ((11, "3.6 MB"), (4107, "1.34 GB"), (32779, "10.72 GB"), (128011, "41.9 GB")):
        ours = llama3.kv_bytes(entries)
        shown = f"{ours / 1e6:.2f} MB" if ours < 1e8 else f"{ours / 1e9:.2f} GB"
        yield "004", f"KV of {entries:,} entries", theirs, shown, "agree"
    single = Roofline(llama3, h100, bf16).step([Rows(1, 4096, 1)])
    yield (
        "004", "a decoded token at 4,096: GFLOPs; GB; intensity", "54; 131; 0.41",
        f"{single.flops / 1e9:.1f}; {single.bytes / 1e9:.1f}; {single.flops / single.bytes:.2f}",
        "FLOPs 2.8 times low",
    )  # fmt: skip
    yield (
        "004", "decode below the balance", "720 times", f"{h100.balance() * single.bytes / single.flops:.0f} times",
        "follows from the FLOPs",
    )  # fmt: skip
    for batch, theirs in ((8, 3.1), (32, 10.1), (64, 16.2)):
        step = Roofline(llama3, h100, bf16).step([Rows(1, 4096, 1)] * batch)
        yield (
            "004", f"intensity at {batch} users", f"{theirs}", f"{step.flops / step.bytes:.1f}",
            f"{step.flops / step.bytes / theirs:.1f} times low",
        )  # fmt: skip
    for batch, ms in ((1, 40), (8, 42), (32, 51)):
        step = Roofline(llama3, h100, bf16).step([Rows(1, 4096, 1)] * batch)
        yield (
            "004", f"ms a token, {batch} users at 4,096", str(ms), f"{1e3 * step.bytes / h100.bandwidth:.1f}",
            "near the full bandwidth of a card that cannot hold the weights",
        )  # fmt: skip


def floor(model: Specification, machine: Machine, tokens: int, cards: int = 1) -> float:
    """Milliseconds of a prefill in bf16 below which no program can be."""
    step = Roofline(model, machine, FORMATS["bf16"]).step([Rows(tokens, 0, 1)])
    needed = max(step.flops / machine.flops["bf16"], FORMATS["bf16"].total(model) / machine.bandwidth)
    return 1e3 * needed / cards


def page() -> str:
    return HEAD + "".join(
        f"| {' | '.join(row)} |\n" for source in (source_001, source_002, source_004) for row in source()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=PAGE)
    parser.parse_args().output.write_text(page())


if __name__ == "__main__":
    main()
