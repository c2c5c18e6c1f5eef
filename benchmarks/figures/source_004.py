"""Source 004: both strokes of Llama 3 70B on H100s, its tables in their order."""

from collections.abc import Iterator

from benchmarks.figures.row import Row, against, floor, off
from twostroke.models.cost import SequenceRows
from twostroke.study.plan.machines import find_machine
from twostroke.study.plan.models import specifications
from twostroke.study.plan.roofline import Roofline
from twostroke.study.plan.weights import FORMATS

LLAMA, H100, BF16 = specifications()["llama-3-70b"], find_machine("h100"), FORMATS["bf16"]
PEAK, BANDWIDTH, MEMORY = H100.flops["bf16"], H100.bandwidth, H100.memory
WEIGHTS, TOKEN = BF16.total(LLAMA), LLAMA.kv_bytes(1)


def source_004() -> Iterator[Row]:
    """Every table and figure in the text."""
    yield from _sizes()
    yield from _prefill()
    yield from _growth()
    yield from _tiers()
    yield from _single()
    yield from _batches()
    yield from _apart()


def _sizes() -> Iterator[Row]:
    values = 11 * LLAMA.kv_values
    yield Row(
        "KV of 11 tokens: values; bytes",
        "22,528,000; 43 MB",
        f"{values:,}; {2 * values / 1e6:.1f} MB",
        f"{22_528_000 / values:.1f} times high",
    )
    at_4k = LLAMA.kv_bytes(4096) / 1e9
    yield Row("KV of 4,096 tokens; of 50 users, GB", "1.34; 67", f"{at_4k:.3f}; {50 * at_4k:.1f}", "agree")
    left = 2 * MEMORY - WEIGHTS
    yield Row(
        "weights, GB; H100s at least",
        "140; 2",
        f"{WEIGHTS / 1e9:.1f}; 2 keep {left / 1e9:.0f} GB for KV, {0.9 * 2 * MEMORY / 1e9 - WEIGHTS / 1e9:.1f} with a "
        f"tenth reserved",
        "agree",
    )


def _prefill() -> Iterator[Row]:
    for tokens, tera, ms, kv in (
        (128, 0.5, 8, 42), (512, 8, 25, 167), (2048, 128, 85, 670), (4096, 512, 180, 1340), (8192, 2048, 450, 2680),
        (32768, 32768, 3500, 10700),
    ):  # fmt: skip
        scores, least = LLAMA.attention_flops(SequenceRows(tokens)) / 1e12, floor(LLAMA, H100, tokens)
        yield Row(
            f"{tokens:,} tokens on one H100: TFLOPs of attention; ms; KV in MB",
            f"{tera:,g}; {ms:,}; {kv:,}",
            f"{scores:,.3f} causal, {2 * scores:,.3f} full; floor {least:,.0f}; {LLAMA.kv_bytes(tokens) / 1e6:,.0f}",
            f"FLOPs {tera / (2 * scores):.1f} times high; {against(ms, least)}; KV agrees",
        )
    least = floor(LLAMA, H100, 4096, 4)
    yield Row("4,096 tokens on 4 H100s, ms", "45", f"floor {least:,.0f}", against(45, least))
    parts = LLAMA.prefill_flops(4096)
    whole = sum(parts.values())
    yield Row(
        "time at 4,096: attention; feed-forward; other",
        "55%; 40%; 5%",
        f"FLOPs {(parts['projections'] + parts['scores']) / whole:.0%} (scores {parts['scores'] / whole:.0%}); "
        f"{parts['feed-forward'] / whole:.0%}; norms are not counted",
        "inverted",
    )
    step = Roofline(LLAMA, H100, BF16).step([SequenceRows(4096, 0, 1)])
    yield Row(
        "prefill at 4,096: compute; bandwidth utilized",
        "85%; 35%",
        f"180 ms are {step.flops / PEAK / 0.18:.0%} of the peak; at 85% weights and KV take "
        f"{0.85 * (step.bytes / BANDWIDTH) / (step.flops / PEAK):.0%} of the bandwidth (activations not counted)",
        "85% and 180 ms exclude each other",
    )


def _growth() -> Iterator[Row]:
    for entries, theirs, share in (
        (11, "3.6 MB", "0.005%"), (61, "20 MB", "0.025%"), (211, "69 MB", "0.086%"), (4107, "1.34 GB", "1.68%"),
        (32779, "10.72 GB", "13.4%"), (128011, "41.9 GB", "52.3%"),
    ):  # fmt: skip
        size = LLAMA.kv_bytes(entries)
        shown = f"{size / 1e6:.2f} MB" if size < 1e8 else f"{size / 1e9:.2f} GB"
        yield Row(
            f"KV of {entries:,} entries; of an H100", f"{theirs}; {share}", f"{shown}; {size / MEMORY:.3%}", "agree"
        )
    user = LLAMA.kv_bytes(4096)
    fitting = {
        name: max(0, int((MEMORY - FORMATS[name].total(LLAMA)) // user)) for name in ("bf16", "fp8", "int4-g128")
    }
    for users, theirs in ((1, "fits"), (10, "fits"), (30, "tight"), (50, "out of memory")):
        yield Row(
            f"{users} user{'s' if users > 1 else ''} at 4K on one H100",
            f"{users * 1.34:.2f} GB, {theirs}",
            f"{users * user / 1e9:.2f} GB; beside weights: {fitting['bf16']} in bf16, {fitting['fp8']} in fp8, "
            f"{fitting['int4-g128']} in 4 bits",
            "KV agrees; the weights are left out" if users < 50 else "agree, for another reason",
        )


def _tiers() -> Iterator[Row]:
    host, disk = H100.host or 0.0, 12e9
    yield Row(
        "KV from ordinary memory, GB/s",
        "200",
        f"{host / 1e9:.0f} over PCIe 5, one way",
        f"{200e9 / host:.1f} times high: it has to cross the bus",
    )
    user = 15e9
    yield Row(
        "a user's 15 GB from an SSD of 12 GB/s",
        "10 ms",
        f"{user / disk:.2f} s; 10 ms bring {int(disk * 0.01 / TOKEN)} tokens",
        f"{user / disk / 0.01:.0f} times low",
    )
    yield Row(
        "bytes/s above which a tier is quicker than computing, 4 H100s",
        "not stated",
        f"{LLAMA.kv_bytes(4096) / floor(LLAMA, H100, 4096, 4) * 1e3 / 1e9:.1f} GB/s at the peak",
        "so both tiers pay",
    )
    yield Row(
        "more users with tiers",
        "10 times",
        f"by bytes: RAM of 2 TB besides one H100 holds {(2e12 + MEMORY) / MEMORY:.0f} times as much",
        "possible; how many of them decode at once is another matter",
    )


def _single() -> Iterator[Row]:
    layer = 2 * LLAMA.layer_parameters / LLAMA.num_layers
    read = 80 * layer + 2 * LLAMA.head.parameters
    yield Row(
        "weights read a token: a layer; all",
        "1.63 GB; 130 GB",
        f"{layer / 1e9:.2f} GB; {80 * layer / 1e9:.0f} GB, {read / 1e9:.0f} with the head",
        f"{read / 130e9 - 1:.0%} low",
    )
    yield Row("KV read a layer at 4K", "16 MB", f"{LLAMA.kv_bytes(4096) / 80 / 1e6:.1f} MB", "agree")
    single = Roofline(LLAMA, H100, BF16).step([SequenceRows(1, 4096, 1)])
    yield Row(
        "a decoded token at 4,096: GFLOPs; GB; intensity",
        "54; 131; 0.41",
        f"{single.flops / 1e9:.1f}; {single.bytes / 1e9:.1f}; {single.flops / single.bytes:.2f}",
        f"FLOPs {off(54, single.flops / 1e9)}",
    )
    yield Row("balance of an H100, FLOPs a byte", "295", f"{H100.balance():.0f}", "agree")
    below = H100.balance() * single.bytes / single.flops
    yield Row(
        "decode below the balance; cores idle",
        "720 times; 99.86%",
        f"{below:.0f} times; {1 - 1 / below:.2%}",
        off(720, below),
    )
    bytes_of = {part.name: part.bytes / single.bytes for part in single.parts}
    yield Row(
        "time of a token: weights (QKV, FFN, output); KV; compute",
        "87% (22, 55, 10); 9%; 3%",
        f"bytes: projections {bytes_of['projections']:.0%}, FFN {bytes_of['feed-forward']:.0%}, head "
        f"{bytes_of['head']:.1%}; KV {bytes_of['scores']:.1%}; compute at the peak {1 / below:.2%}",
        f"FFN too low; KV {0.09 / bytes_of['scores']:.0f} times high, compute {0.03 * below:.0f} times",
    )


def _batches() -> Iterator[Row]:
    roofline = Roofline(LLAMA, H100, BF16)
    for batch, theirs in ((1, 0.41), (8, 3.3), (32, 13.1), (128, 52)):
        step = roofline.step([SequenceRows(1, 0, 1)] * batch)
        ours = step.flops / step.bytes
        yield Row(f"intensity of the weights alone, batch {batch}", f"{theirs:g}", f"{ours:.1f}", off(theirs, ours))
    for batch, theirs, read in ((1, 0.41, 131), (8, 3.1, 140), (32, 10.1, 172), (64, 16.2, 213)):
        step = roofline.step([SequenceRows(1, 4096, 1)] * batch)
        ours = step.flops / step.bytes
        yield Row(
            f"{batch} user{'s' if batch > 1 else ''} at 4K: GB read a step; intensity",
            f"{read}; {theirs}",
            f"{step.bytes / 1e9:.0f}; {ours:.1f}",
            f"bytes {off(read, step.bytes / 1e9, near=0.08)}; intensity {off(theirs, ours)}",
        )
    for batch, ms, rate in ((1, 40, 25), (8, 42, 190), (32, 51, 627)):
        seconds = roofline.step([SequenceRows(1, 4096, 1)] * batch).bytes / BANDWIDTH
        yield Row(
            f"{batch} user{'s' if batch > 1 else ''} at 4K: ms a token; tokens/s",
            f"{ms}; {rate}",
            f"{1e3 * seconds:.1f}; {batch / seconds:.0f} at the full bandwidth",
            f"{1 - ms / 1e3 / seconds:.0%} below the floor, on a card that cannot hold the weights",
        )
    user = LLAMA.kv_bytes(4096)
    yield Row(
        "users a GPU where decode is best",
        "32 to 64",
        f"KV of 64 at 4K is {64 * user / 1e9:.1f} GB",
        "impossible beside weights",
    )
    yield Row("10,000 tokens at 40 ms", "400 s", f"{10_000 * 0.04:.0f} s", "agree; it grows with the context")
    gains = [sum(share**made for made in range(5)) for share in (0.5, 0.6, 0.8, 0.9)]
    yield Row(
        "speculative decoding",
        "2 to 4 times",
        f"tokens a pass with 4 guesses: {gains[0]:.1f} if half of them stand, {gains[1]:.1f} at 60%, {gains[2]:.1f} at "
        f"80%, {gains[3]:.1f} at 90%",
        "the most there is, before the draft's own time",
    )


def _apart() -> Iterator[Row]:
    link = H100.link or 0.0
    size = LLAMA.kv_bytes(4096)
    yield Row(
        "KV from a prefill GPU over NVLink",
        "1 ms",
        f"{1e3 * size / link:.1f} ms for 4,096 tokens; 1 ms moves {int(link * 1e-3 / TOKEN):,} tokens",
        "short prompts alone",
    )
    yield Row(
        "apart: prefill's compute 60 to 90%, decode's bandwidth 40 to 85%, 2 times the requests",
        "stated without a source",
        "not derivable from sizes",
        "not checked",
    )
