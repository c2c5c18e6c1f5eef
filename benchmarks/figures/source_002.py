"""Source 002: prefill of Llama 70B on A100s, its tables in their order."""

from collections.abc import Iterator
from math import ceil

from benchmarks.figures.row import Row, against, floor, off
from twostroke.models.cost import SequenceRows
from twostroke.study.plan.machines import find_machine
from twostroke.study.plan.models import specifications
from twostroke.study.plan.roofline import Roofline
from twostroke.study.plan.weights import FORMATS

LLAMA, A100, BF16 = specifications()["llama-2-70b"], find_machine("a100"), FORMATS["bf16"]
PEAK, BANDWIDTH, LINK = A100.flops["bf16"], A100.bandwidth, 300e9
WEIGHTS = BF16.total(LLAMA)
LAYERS, HEADS, D = LLAMA.num_layers, LLAMA.layers[0].heads, LLAMA.hidden


def source_002() -> Iterator[Row]:
    """Every table and figure in the text."""
    yield from _intensity()
    yield from _flops()
    yield from _latency()
    yield from _chunks()
    yield from _flash_attention()
    yield from _tensor_parallelism()
    yield from _prefixes()
    yield from _prompts()
    yield from _decode()
    yield from _summary()


def tera(tokens: int, known: int = 0) -> float:
    """TFLOPs of a prefill."""
    return sum(LLAMA.prefill_flops(tokens, known).values()) / 1e12


def _intensity() -> Iterator[Row]:
    yield Row("crossover of an A100, FLOPs a byte", "156", f"{A100.balance():.0f}", "agree, with 2.0 TB/s")
    single = Roofline(LLAMA, A100, BF16).step([SequenceRows(1, 0, 1)])
    yield Row("intensity of decode at batch 1", "1 to 2", f"{single.flops / single.bytes:.2f}", "agree")
    flops, size = 2 * 4096 * 8192 * 28672, 2 * (4096 * 8192 + 8192 * 28672 + 4096 * 28672)
    ours = f"{flops / 1e12:.3f} T; {size / 1e9:.3f} GB; {flops / size:,.0f}"
    verdict = f"FLOPs agree; bytes {off(1.0, size / 1e9)}"
    yield Row("up-projection, 4,096 rows: FLOPs; bytes; intensity", "1.93 T; 1.0 GB; 1,930", ours, verdict)


def _flops() -> Iterator[Row]:
    one = {part: value / LAYERS / D**2 for part, value in LLAMA.prefill_flops(1).items()}
    yield Row(
        "FLOPs of a layer a token, in D²: projections; FFN",
        "8; 16",
        f"{one['projections']:.1f}; {one['feed-forward']:.1f}",
        "their formulas are for MHA and an FFN of 8D/3; this model has 8 KV heads and 3.5D",
    )
    crossover = LLAMA.crossover() or 0
    verdict = f"{crossover / 8000:.0f} to {crossover / 4000:.0f} times low"
    yield Row("scores take more FLOPs than the rest from", "4,000 to 8,000", f"{crossover:,} tokens", verdict)
    for tokens, attention, scores, mlp, share in (
        (256, 0.028, 0.001, 0.060, 32), (1024, 0.110, 0.017, 0.240, 35), (4096, 0.440, 0.275, 0.960, 43),
        (8192, 0.879, 1.100, 1.920, 51), (16384, 1.759, 4.400, 3.840, 62), (32768, 3.518, 17.600, 7.680, 73),
    ):  # fmt: skip
        parts = {part: value / LAYERS / 1e12 for part, value in LLAMA.prefill_flops(tokens).items()}
        both, whole = parts["projections"] + parts["scores"], sum(parts.values()) - parts["head"]
        ours = f"{parts['projections']:.3f}; {parts['scores']:.3f}; {parts['feed-forward']:.3f}"
        low = f"projections {off(attention, parts['projections'])}, FFN {off(mlp, parts['feed-forward'])}"
        yield Row(
            f"TFLOPs of a layer, {tokens:,} tokens: projections; scores; FFN; attention's part",
            f"{attention}; {scores}; {mlp}; {share}%",
            f"{ours}; {100 * both / whole:.0f}%",
            low,
        )


def _latency() -> Iterator[Row]:
    least = floor(LLAMA, A100, 4096)
    yield Row("4,096 tokens on one A100 (first paragraph)", "over a second", f"floor {least:,.0f} ms", "agree")
    for tokens, ms, ttft, theirs in (
        (128, 45, 52, 1.7), (512, 120, 130, 6.8), (1024, 210, 225, 13.7), (2048, 390, 410, 27.7),
        (4096, 780, 810, 57.5), (8192, 1800, 1850, 125), (32768, 12500, 12600, 920),
    ):  # fmt: skip
        least = floor(LLAMA, A100, tokens)
        yield Row(
            f"prefill of {tokens:,} tokens on one A100: ms; TTFT; TFLOPs",
            f"{ms:,}; {ttft:,}; {theirs:g}",
            f"floor {least:,.0f}; {tera(tokens):,.1f}",
            f"{against(ms, least)}, weights of {WEIGHTS / 1e9:.0f} GB in 80; FLOPs {off(theirs, tera(tokens))}",
        )
    fastest = PEAK / LLAMA.row_flops
    yield Row("tokens/s of one A100 at its peak", "3,200 (below)", f"{fastest:,.0f} at most", "impossible")


def _chunks() -> Iterator[Row]:
    """Which cards a longest step needs: chunk and 200 decoding sequences are C + 200 rows."""
    for chunk, ttft, tbt, rate in (
        (256, 1800, 28, 3050), (512, 1400, 35, 3180), (1024, 1250, 52, 3250), (2048, 1180, 85, 3280),
        (4096, 1150, 142, 3300),
    ):  # fmt: skip
        least = 1e3 * max((chunk + 200) * LLAMA.row_flops / PEAK, WEIGHTS / BANDWIDTH)
        yield Row(
            f"chunks of {chunk:,}, 200 users: median TTFT; P99 between tokens; tokens/s",
            f"{ttft:,}; {tbt} ms; {rate:,}",
            f"floor of such a step {least:,.0f} ms on one card",
            f"impossible on fewer than {ceil(least / tbt)} cards; it falls with the chunk, as they say",
        )
    least = floor(LLAMA, A100, 4096)
    yield Row(
        "without chunks: median TTFT; P99 between tokens",
        "1,200; 1,180 ms",
        f"{least:,.0f} ms is the floor of one prompt of 4,096",
        "impossible on one card, if prompts have 4,096 tokens (they are not stated)",
    )
    tokens, chunk = 32768, 512
    weights, again = tokens // chunk * WEIGHTS, LLAMA.kv_bytes(1) * tokens**2 / (2 * chunk)
    alone = sum(LLAMA.prefill_flops(tokens).values())
    starts = range(0, tokens, chunk)
    pieces = sum(sum(LLAMA.prefill_flops(chunk, start).values()) - LLAMA.head.row_flops for start in starts)
    yield Row(
        "chunking adds no compute",
        "the same FLOPs",
        f"{pieces / (alone - LLAMA.head.row_flops):.4f} of them; 32K in chunks of 512 reads {weights / 1e12:.1f} TB of "
        f"weights (once: {WEIGHTS / 1e12:.2f}) and {again / 1e12:.2f} TB of KV",
        "agree on FLOPs; bytes are left out",
    )


def _flash_attention() -> Iterator[Row]:
    yield Row(
        "traffic of FlashAttention",
        "L² d / M",
        "L² d² / M (Dao et al. 2022, arXiv:2205.14135, theorem 2)",
        "a factor d",
    )
    for tokens, standard, flash, saved in (
        (512, 42, 28, "0.5"), (1024, 125, 52, "2.0"), (2048, 410, 138, "8.0"), (4096, 1520, 420, "32"),
        (8192, 5800, 1250, "128"),
    ):  # fmt: skip
        matrix = HEADS * tokens**2 * 2
        extra = 1e3 * LAYERS * 4 * matrix / BANDWIDTH  # scores written and read, weights written and read
        least = floor(LLAMA, A100, tokens)
        yield Row(
            f"{tokens:,} tokens, standard and tiled attention: ms; speed-up; memory saved",
            f"{standard:,} and {flash:,}; {standard / flash:.1f}; {saved} GB",
            f"floor of the whole {least:,.0f}; the matrix adds {extra:,.0f}: {1 + extra / least:.2f}; "
            f"{matrix / 1e9:.3g} GB",
            f"{against(flash, least)}; memory {off(float(saved), matrix / 1e9)}",
        )
    matrix = HEADS * 16384**2 * 2
    least = floor(LLAMA, A100, 16384)
    yield Row("16,384 tokens, tiled attention, ms", "4,200", f"floor of the whole {least:,.0f}", against(4200, least))
    yield Row(
        "standard attention at 16,384 is out of memory: heads; GB",
        "80; over 160",
        f"{HEADS}; {matrix / 1e9:.0f} at a time",
        "80 are layers, and their matrices do not live at once",
    )


def _tensor_parallelism() -> Iterator[Row]:
    ring = Roofline(LLAMA, A100, BF16, 8).all_reduce_bytes(4096)
    one_way = 1e3 * ring / LINK
    yield Row(
        "all-reduce of 4,096 rows at TP 8: bytes; ms; of 80 layers",
        "117 MB; 0.2; 32",
        f"{ring / 1e6:.1f} MB; {one_way:.2f}; {2 * LAYERS * one_way:.0f}",
        "bytes agree; they count a link's both directions",
    )
    for cards, ms, spent, busy in ((1, 780, 0, 89), (2, 410, 12, 85), (4, 215, 22, 80), (8, 120, 35, 73)):
        sent = 0.0 if cards == 1 else Roofline(LLAMA, A100, BF16, cards).all_reduce_bytes(4096)
        least, reached = floor(LLAMA, A100, 4096, cards), tera(4096) * 1e12 / (ms / 1e3 * cards * PEAK)
        yield Row(
            f"4,096 tokens on {cards} A100{'s' if cards > 1 else ''}: ms; communication; utilization",
            f"{ms}; {spent} ms; {busy}%",
            f"floor {least:,.0f}; {1e3 * 2 * LAYERS * sent / LINK:.0f} ms; {ms} ms are {reached:.0%}",
            against(ms, least),
        )


def _prefixes() -> Iterator[Row]:
    yield Row(
        "a prefix of 2,000 tokens: TFLOPs; PFLOP/s saved at 100 requests/s",
        "50; 5",
        f"{tera(2000):.0f}; {tera(2000) / 10:.0f}",
        off(50, tera(2000)),
    )
    for query in (128, 512):
        whole, rest = tera(2048 + query), tera(query, 2048)
        partly = tera(2048 + query - 1270, 1270)
        yield Row(
            f"2,048 shared tokens and a query of {query}: no cache to warm; to 62% found",
            "410 to 85 ms, 4.8; to 180, 2.3",
            f"FLOPs {whole / rest:.1f} times fewer; {whole / partly:.1f}",
            "plausible for a query of 512, whose length is not stated"
            if query == 512
            else "more, if queries are short",
        )


def _prompts() -> Iterator[Row]:
    ratio = tera(312) / tera(847)
    yield Row(
        "847 to 312 tokens: FFN; attention",
        "-63%; -86%",
        f"{312 / 847 - 1:.0%}; scores {(312 / 847) ** 2 - 1:.0%}; all FLOPs {ratio - 1:.0%}",
        "agree; scores are a small part at this length",
    )
    most = tera(3800)
    for tokens, ms, part in ((3800, 720, 1.0), (1400, 280, 0.26), (800, 165, 0.13), (350, 78, 0.04), (180, 48, 0.01)):
        least, ours = floor(LLAMA, A100, tokens), tera(tokens) / most
        yield Row(
            f"a prompt of {tokens:,} tokens: TTFT; FLOPs relative to 3,800",
            f"{ms} ms; {part}",
            f"floor {least:,.0f}; {ours:.3f}",
            f"{against(ms, least)}; FLOPs {off(part, ours)}: they are nearly linear",
        )


def _decode() -> Iterator[Row]:
    token = 1e3 * WEIGHTS / BANDWIDTH
    yield Row(
        "128 prompt tokens, 500 made at 50 ms each: decode for prefill",
        "500 times",
        f"{500 * 50 / 45:.0f} times by their times; {500 * token / floor(LLAMA, A100, 128):.0f} by floors",
        "agree; a prefill of 128 tokens takes as long as one token, since both read the weights",
    )
    yield Row(
        "200 prompt tokens, 2,000 made: prefill; decode; prefill's part",
        "55 ms; 40,000 ms; 0.14%",
        f"floors {floor(LLAMA, A100, 200):,.0f}; {2000 * token:,.0f} ms on one card; "
        f"{floor(LLAMA, A100, 200) / (2000 * token):.2%}",
        f"20 ms a token are below the {token:.0f} that the weights take on one card",
    )


def _summary() -> Iterator[Row]:
    """The combined table, and what it makes of 69 times."""
    base = floor(LLAMA, A100, 4096)
    for name, ms, least in (
        ("one card, standard attention", 1520, base),
        ("tiled attention", 420, base),
        ("2K of 4K shared", 180, floor(LLAMA, A100, 2048, known=2048)),
        ("and 4 cards", 55, floor(LLAMA, A100, 2048, 4, known=2048)),
        ("and prompts of 2,048 tokens, none of them known", 22, floor(LLAMA, A100, 2048, 4)),
    ):
        yield Row(
            f"4,096 tokens: {name}: ms; speed-up",
            f"{ms:,}; {1520 / ms:.1f}",
            f"floor {least:,.0f}; {base / least:.1f}",
            against(ms, least),
        )
    yield Row(
        "69 times",
        "1,520 / 22",
        f"{base / floor(LLAMA, A100, 2048, 4):.1f} by floors",
        "with 2,048 of 2,048 tokens known nothing is left to prefill",
    )
