"""`twostroke bench serve`: a server under load."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke.cli.options import JsonFlag, spread
from twostroke.cli.report import goodput_text, latency_table, print_json, print_lines, progress_bar, rates_text
from twostroke.cli.traffic import Number, Tokens, TrafficOptions, above_zero, parse_range
from twostroke.errors import InvalidRequest
from twostroke.system.extras import requires_extra

if TYPE_CHECKING:
    from twostroke.study.bench.serving.client import LoadTest
    from twostroke.study.bench.serving.target import Target
    from twostroke.study.traffic.requests import Traffic


@spread
def serve(
    *,
    url: Annotated[str, typer.Option(help="The server's address.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option("--model", "-m", show_default="the first it names")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="TWOSTROKE_API_KEY", help="Sent as a bearer token.")] = None,
    traffic_options: TrafficOptions,
    warmup: Annotated[
        int, typer.Option(min=0, help="Unmeasured requests before them, sent at once.", rich_help_panel="Load")
    ] = 4,
    timeout: Annotated[
        float,
        typer.Option(callback=above_zero, help="Seconds after which a request counts as lost.", rich_help_panel="Load"),
    ] = 600,
    token_ids: Annotated[
        Tokens,
        typer.Option(
            parser=parse_range,
            metavar="LOW-HIGH",
            help="Ids of prompts.",
            show_default="asked of /tokenize",
            rich_help_panel="Workload",
        ),
    ] = None,
    slo_ttft_ms: Annotated[Number, typer.Option(callback=above_zero, help="TTFT objective, for goodput.")] = None,
    slo_itl_ms: Annotated[
        Number, typer.Option(callback=above_zero, help="ITL objective: of the 99th percentile of an answer's gaps.")
    ] = None,
    as_json: JsonFlag = False,
    output: Annotated[Path | None, typer.Option(help="A directory for every request, the summary and a plot.")] = None,
) -> None:
    """Load an OpenAI-compatible server, ours or another, with seeded prompts of exact length, and report latencies,
    throughput and goodput. Every prompt is new to the server unless --prefix-tokens says otherwise. Ctrl-C ends it
    with a report of what was measured so far."""
    with requires_extra("bench", "bench serve"):
        from twostroke.study.bench.serving.figures import DEFINITIONS, check_output, save, summarize
        from twostroke.study.traffic.objectives import Objectives
        from twostroke.system.machine import describe as describe_machine

    traffic_options.check()
    if output is not None:
        check_output(output)
    objectives = Objectives.of_ms(slo_ttft_ms, slo_itl_ms)
    traffic = traffic_options.traffic()
    target, run = measure(url, api_key, model, token_ids, timeout, traffic, warmup)

    facts = {"url": url, "model": target.model, "server": target.owner, "seed": traffic.seed, "warmup": warmup}
    facts |= {"workload": traffic_options.describe(traffic), "arrivals": traffic.pattern.describe()}
    facts |= {"shared_tokens": int(traffic.shared.sum())}
    facts |= {"objectives": asdict(objectives), "cut_short": run.interrupted}
    facts |= summarize(run.outcomes, objectives, run.cpu_s) | describe_machine() | {"definitions": DEFINITIONS}
    if output is not None:
        save(output, facts, run.outcomes, objectives)
    print_json(facts) if as_json else print_report(facts)
    if run.interrupted:
        raise typer.Exit(130)


def measure(
    url: str, api_key: str | None, model: str | None, token_ids: Any, timeout_s: float, traffic: "Traffic", warmup: int
) -> "tuple[Target, LoadTest]":
    """Inspect the server, warm up, and run the test, with a bar on a terminal. Raises InvalidRequest."""
    import asyncio

    import httpx

    from twostroke.study.bench.serving.client import Client, drive
    from twostroke.study.bench.serving.target import inspect
    from twostroke.study.traffic.requests import WARMUP, ClosedLoop

    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    base = url.rstrip("/").removesuffix("/v1")

    async def go(advance: Callable[[], None]) -> "tuple[Target, LoadTest]":
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=base, headers=headers, limits=limits, timeout=timeout_s) as http:
            target = await inspect(http, model, token_ids)
            asks = traffic.token_requests(target.ordinary)
            first = traffic.token_requests(target.ordinary, WARMUP, warmup)
            target.check_length(max(len(ask.prompt) + ask.output_tokens for ask in asks))
            client = Client(http, target.model, timeout_s)
            if first:
                warm = await drive(client, first, ClosedLoop(warmup), traffic.seed)
                if failed := [one.error for one in warm.outcomes if one.error is not None]:
                    raise InvalidRequest(f"{len(failed)} of {warmup} requests that warm up failed: {failed[0]}")
            return target, await drive(client, asks, traffic.pattern, traffic.seed, advance)

    with progress_bar("requests", len(traffic.arrivals)) as advance:
        return asyncio.run(go(advance))


def print_report(facts: dict[str, Any]) -> None:
    """Latencies, throughput, and what limits their validity."""
    from rich.console import Console

    Console(highlight=False).print(latency_table(facts, ".1f"))
    print_lines(remarks(facts))


def remarks(facts: dict[str, Any]) -> list[str]:
    """Lines of text: rates, then what limits their validity."""
    lines = [rates_text(facts)] if facts["duration_s"] else []
    if facts["goodput"] is not None:
        lines.append(goodput_text(facts))
    lines.append(
        f"{facts['model']} at {facts['url']} ({facts['server']}), seed {facts['seed']}, "
        f"after {facts['warmup']} requests to warm up, client at {facts['client_cpu'] or 0:.0%} of a core, "
        f"requests sent at most {(facts['lag_p99_s'] or 0) * 1e3:.1f} ms late (p99)"
    )
    lines += [f"failed: {count} x {error}" for error, count in facts["errors"].items()]
    if facts["cut_short"]:
        lines.append(f"cut short: {facts['interrupted']} were under way, the rest was not sent")
    if facts["short_answers"]:
        lines.append(f"{facts['short_answers']} answers were shorter than asked for: the server ignores ignore_eos")
    if facts["cached_tokens"] and not facts["shared_tokens"]:
        lines.append(f"{facts['cached_tokens']} prompt tokens were cached: these prompts were not new to the server")
    elif facts["cached_tokens"]:
        lines.append(f"{facts['cached_tokens']} of {facts['input_tokens']} prompt tokens came from the prefix cache")
    return lines
