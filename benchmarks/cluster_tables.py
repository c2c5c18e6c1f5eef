"""What `benchmarks.cluster` has measured, as Markdown: one table for each part."""

from __future__ import annotations

from typing import Any

from benchmarks.terminal import markdown


def table(part: str, settings: dict[str, Any]) -> str:
    """The table of a part, from its figures by setting."""
    return {"apart": _apart, "hop": _hop, "routing": _routing, "migration": _migration}[part](settings)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def _both(figures: dict[str, float]) -> list[str]:
    return [_ms(figures["p50"]), _ms(figures["p99"])]


def _apart(settings: dict[str, Any]) -> str:
    columns = ["while long prompts arrive", *("TTFT p50, ms", "p99"), *("ITL p50, ms", "p99"), "tokens/s"]
    return markdown(
        columns,
        [
            [setting, *_both(one["ttft_s"]), *_both(one["itl_s"]), f"{one['tokens_per_second']:,.0f}"]
            for setting, one in settings.items()
        ],
    )


def _hop(settings: dict[str, Any]) -> str:
    lengths = list(next(iter(settings.values())))
    crossed = {length: one[length].get("bytes") for one in settings.values() for length in one}
    rows = [
        [
            f"{int(length):,}",
            *(_ms(one[length]["ttft_s"]) for one in settings.values()),
            "" if crossed[length] is None else f"{crossed[length] / 1e6:,.1f}",
        ]
        for length in lengths
    ]
    return markdown(["prompt tokens", *(f"TTFT, {setting}, ms" for setting in settings), "MB that cross"], rows)


def _routing(settings: dict[str, Any]) -> str:
    rows = [[setting, *_both(one["ttft_s"]), f"{one['cached_share']:.0%}"] for setting, one in settings.items()]
    return markdown(["router", "TTFT p50, ms", "p99", "prompt tokens from a cache"], rows)


def _migration(settings: dict[str, Any]) -> str:
    rows = [
        [setting, _ms(one["itl_s"]), *_both(one["stall_s"]), f"{one['stall_itls']:,.0f}"]
        for setting, one in settings.items()
    ]
    return markdown(["death", "ITL, ms", "longest gap p50, ms", "p99", "in ITLs"], rows)
