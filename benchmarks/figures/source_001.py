"""Source 001: sizes of the KV cache, and what it saves."""

from collections.abc import Iterator

from benchmarks.figures.row import Row
from twostroke.study.plan.models import specifications


def source_001() -> Iterator[Row]:
    """Table by table."""
    known = specifications()
    for name, theirs, verdict in (
        ("llama-2-7b", "0.5 MB; 1.0 GB", "agree, in binary units"),
        ("llama-2-13b", "0.8 MB; 1.6 GB", "agree"),
        ("llama-2-70b", "2.5 MB; 5.0 GB", "8 times high: 8 of the 64 heads hold KV (right for LLaMA 1 65B)"),
        ("llama-1-65b", "2.5 MB; 5.0 GB", "agree, if this model was meant"),
        ("gpt-3-175b", "4.5 MB; 9.0 GB", "agree"),
    ):
        model = known[name]
        ours = f"{model.kv_bytes(1) / 2**20:.4g} MiB; {model.kv_bytes(2048) / 2**30:.4g} GiB"
        yield Row(f"KV of {name}: a token; 2,048 tokens", theirs, ours, verdict)
    seven = known["llama-2-7b"]
    users = f"{100 * seven.kv_bytes(2048) / 2**30:.0f} GiB of the 7B"
    yield Row("KV of 100 users at 2K", "100 times that", users, "agree")
    prompt, made = 500, 200
    steps = range(prompt, prompt + made)
    naive, cached = sum(steps), prompt + made - 1
    yield Row(
        "K and V computed at p = 500, g = 200",
        "g p + g²/2 = 120,000 to p + g = 700, 171 times",
        f"{naive:,} to {cached:,}, {naive / cached:.1f} times",
        "agree (the token made last is not entered)",
    )
    yield Row(
        "compute with a cache, for g tokens made",
        "O(g) for O(g²)",
        f"projections {cached:,}; query-key pairs of decode still {naive:,}",
        "true of projections and feed-forward; scores stay O(g²)",
    )
    entered, tokens = 1000 + 500 - 1, 1000
    yield Row(
        "its question 1: K vectors of a head at 1,000 + 500; of prefill; of decode",
        "asked",
        f"{entered:,}; {tokens:,}; {entered - tokens}",
        "1,500 if the last token is entered too",
    )
    size = f"{seven.kv_bytes(1500) / 2**20:.0f} MiB"
    yield Row("its question 3: KV of the 7B at 1,000 + 500", "asked", size, "0.5 MiB a token")
