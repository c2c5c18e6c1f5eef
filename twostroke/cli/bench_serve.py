"""`twostroke bench serve`: a server under load."""

import re
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke.cli.options import JsonFlag, checked, spread
from twostroke.cli.report import print_json, stderr_console
from twostroke.errors import InvalidRequest
from twostroke.fields import LARGE, Rule
from twostroke.system.extras import extra

if TYPE_CHECKING:
    from twostroke.perf.serving.drive import ClosedLoop, LoadTest, OpenLoop
    from twostroke.perf.serving.target import Target
    from twostroke.perf.serving.workload import Workload


def parse_range(text: str) -> Any:
    """`512`, or `128-1024`."""
    from twostroke.perf.serving.lengths import Range

    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", str(text))
    if match is None:
        raise typer.BadParameter(f"{text!r} is no number: write 512, or 128-1024")
    found = Range(int(match[1]), int(match[2] or match[1]))
    if not 1 <= found.least <= found.most:
        raise typer.BadParameter(f"{text!r} must go from 1 or more upwards")
    return found


above_zero = checked(Rule(float, above=0, most=LARGE, optional=True))


def _load(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Load", **settings)


def _workload(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Workload", **settings)


Tokens = Any
Seconds = float | None


@dataclass(frozen=True)
class LoadOptions:
    """When requests are sent, and how many."""

    rate: Annotated[Seconds, _load(callback=above_zero, help="Requests per second, in open loop.")] = None
    burstiness: Annotated[
        float,
        _load(
            callback=above_zero,
            help="Shape of the gamma-distributed gaps: 1 is Poisson, less comes in bursts.",
        ),
    ] = 1.0
    concurrency: Annotated[int | None, _load(min=1, help="Requests in flight at any time, in closed loop.")] = None
    requests: Annotated[int, _load(min=1, help="How many are measured.")] = 100
    warmup: Annotated[int, _load(min=0, help="Unmeasured requests before them, sent at once.")] = 4
    timeout: Annotated[Seconds, _load(callback=above_zero, help="Seconds after which a request counts as lost.")] = 600

    def check(self) -> None:
        """Raises BadParameter."""
        if (self.rate is None) == (self.concurrency is None):
            raise typer.BadParameter("say either --rate (open loop) or --concurrency (closed loop)")

    def pattern(self) -> "OpenLoop | ClosedLoop":
        from twostroke.perf.serving.drive import ClosedLoop, OpenLoop

        return OpenLoop(self.rate or 0, self.burstiness) if self.concurrency is None else ClosedLoop(self.concurrency)


@dataclass(frozen=True)
class WorkloadOptions:
    """What the requests are."""

    workload: Annotated[str, _workload(help="synthetic, or sharegpt: lengths as in its conversations.")] = "synthetic"
    input_tokens: Annotated[
        Tokens,
        _workload(parser=parse_range, metavar="N|N-N", help="Prompt lengths, after a prefix.", show_default="512"),
    ] = None
    output_tokens: Annotated[
        Tokens, _workload(parser=parse_range, metavar="N|N-N", help="Answer lengths.", show_default="64")
    ] = None
    prefix_tokens: Annotated[int, _workload(min=0, help="How many first tokens the prompts of a group share.")] = 0
    groups: Annotated[int, _workload(min=1, help="How many groups there are; each has its own prefix.")] = 1
    seed: Annotated[
        int | None,
        _workload(min=0, help="Of prompts and arrivals. The same prompts again may be cached.", show_default="fresh"),
    ] = None
    token_ids: Annotated[
        Tokens,
        _workload(parser=parse_range, metavar="LOW-HIGH", help="Ids of prompts.", show_default="asked of /tokenize"),
    ] = None

    def check(self) -> None:
        """Raises BadParameter."""
        if self.workload not in ("synthetic", "sharegpt"):
            raise typer.BadParameter("synthetic or sharegpt", param_hint="--workload")
        if self.workload == "sharegpt" and (self.input_tokens, self.output_tokens) != (None, None):
            raise typer.BadParameter("sharegpt sets the lengths: leave out --input-tokens and --output-tokens")

    def of(self, requests: int) -> "Workload":
        from twostroke.perf.serving.workload import Workload

        given = self.workload == "synthetic"
        return Workload(
            requests,
            (self.input_tokens or parse_range("512")) if given else None,
            (self.output_tokens or parse_range("64")) if given else None,
            self.prefix_tokens,
            self.groups,
            secrets.randbits(32) if self.seed is None else self.seed,
        )


@spread
def serve(
    *,
    url: Annotated[str, typer.Option(help="The server's address.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option("--model", "-m", show_default="the first it names")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="TWOSTROKE_API_KEY", help="Sent as a bearer token.")] = None,
    load_options: LoadOptions,
    workload_options: WorkloadOptions,
    slo_ttft_ms: Annotated[Seconds, typer.Option(callback=above_zero, help="TTFT objective, for goodput.")] = None,
    slo_itl_ms: Annotated[
        Seconds, typer.Option(callback=above_zero, help="ITL objective: of the 99th percentile of an answer's gaps.")
    ] = None,
    as_json: JsonFlag = False,
    output: Annotated[Path | None, typer.Option(help="A directory for every request, the summary and a plot.")] = None,
) -> None:
    """Load an OpenAI-compatible server, ours or another, with seeded prompts of exact length, and report latencies,
    throughput and goodput. Every prompt is new to the server unless --prefix-tokens says otherwise. Ctrl-C ends it
    with a report of what was measured so far."""
    with extra("bench", "bench serve"):
        from twostroke.perf.serving import files
        from twostroke.perf.serving.figures import DEFINITIONS, Objectives, summarize
        from twostroke.system.machine import describe as describe_machine

    load_options.check()
    workload_options.check()
    if output is not None:
        files.check(output)
    workload, pattern = workload_options.of(load_options.requests), load_options.pattern()
    objectives = Objectives(*(None if ms is None else ms / 1e3 for ms in (slo_ttft_ms, slo_itl_ms)))
    timeout_s, warmup = load_options.timeout or 0, load_options.warmup
    target, run = measure(url, api_key, model, workload_options.token_ids, timeout_s, workload, pattern, warmup)

    facts = {"url": url, "model": target.model, "server": target.owner, "seed": workload.seed, "warmup": warmup}
    facts |= {"workload": describe(workload), "arrivals": {"loop": type(pattern).__name__} | asdict(pattern)}
    facts |= {"objectives": asdict(objectives), "cut_short": run.interrupted}
    facts |= summarize(run.outcomes, objectives, run.cpu_s) | describe_machine() | {"definitions": DEFINITIONS}
    if output is not None:
        files.save(output, facts, run.outcomes, objectives)
    print_json(facts) if as_json else print_report(facts)
    if run.interrupted:
        raise typer.Exit(130)


def describe(workload: "Workload") -> dict[str, Any]:
    lengths = {"inputs": workload.inputs, "outputs": workload.outputs}
    kind = {key: "sharegpt" if one is None else str(one) for key, one in lengths.items()}
    shared = {"prefix_tokens": workload.prefix_tokens, "groups": workload.groups if workload.prefix_tokens else 0}
    return {"requests": workload.requests} | kind | shared


def measure(
    url: str,
    api_key: str | None,
    model: str | None,
    token_ids: Any,
    timeout_s: float,
    workload: "Workload",
    pattern: "OpenLoop | ClosedLoop",
    warmup: int,
) -> "tuple[Target, LoadTest]":
    """Inspect the server, warm up, and run the test, with a bar on a terminal. Raises InvalidRequest."""
    import asyncio

    import httpx
    from rich.progress import Progress

    from twostroke.perf.serving.client import Client
    from twostroke.perf.serving.drive import ClosedLoop, drive
    from twostroke.perf.serving.target import inspect
    from twostroke.perf.serving.workload import WARMUP

    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    base = url.rstrip("/").removesuffix("/v1")

    async def go(advance: Callable[[], None]) -> "tuple[Target, LoadTest]":
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=base, headers=headers, limits=limits, timeout=timeout_s) as http:
            target = await inspect(http, model, token_ids)
            asks, first = workload.make(target.ordinary), workload.make(target.ordinary, WARMUP, warmup)
            target.check_length(max(len(ask.prompt) + ask.output_tokens for ask in asks))
            client = Client(http, target.model, timeout_s)
            if first:
                warm = await drive(client, first, ClosedLoop(warmup), workload.seed)
                if failed := [one.error for one in warm.outcomes if one.error is not None]:
                    raise InvalidRequest(f"{len(failed)} of {warmup} requests that warm up failed: {failed[0]}")
            return target, await drive(client, asks, pattern, workload.seed, advance)

    with Progress(console=stderr_console(), transient=True, disable=not stderr_console().is_terminal) as bar:
        task = bar.add_task("requests", total=workload.requests)
        return asyncio.run(go(lambda: bar.advance(task)))


def print_report(facts: dict[str, Any]) -> None:
    """Latencies, throughput, and what limits their validity."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for name in ("ms", "mean", "p50", "p90", "p99"):
        table.add_column(name, justify="left" if name == "ms" else "right")
    for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s", "queue_s"):
        cells = [facts[name][column] for column in ("mean", "p50", "p90", "p99")]
        if cells[0] is not None:
            table.add_row(name.removesuffix("_s").upper(), *(f"{cell * 1e3:.1f}" for cell in cells))
    console = Console(highlight=False)
    console.print(table)
    for line in remarks(facts):
        console.print(line, soft_wrap=True, markup=False)


def remarks(facts: dict[str, Any]) -> list[str]:
    """Lines of text: rates, then what limits their validity."""
    lines: list[str] = []
    if facts["duration_s"]:
        lines.append(
            f"{facts['completed']} of {facts['sent']} requests in {facts['duration_s']:.1f} s: "
            f"{facts['requests_per_second']:.2f} requests/s, {facts['output_tokens_per_second']:.1f} generated and "
            f"{facts['total_tokens_per_second']:.1f} tokens/s in all"
        )
    if facts["goodput"] is not None:
        met = {key: value for key, value in facts["objectives"].items() if value is not None}
        wanted = " and ".join(f"{key.removesuffix('_s').upper()} of {value * 1e3:g} ms" for key, value in met.items())
        lines.append(f"goodput {facts['goodput']:.2f} requests/s within {wanted}")
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
    if facts["cached_tokens"] and not facts["workload"]["prefix_tokens"]:
        lines.append(f"{facts['cached_tokens']} prompt tokens were cached: these prompts were not new to the server")
    elif facts["cached_tokens"]:
        lines.append(f"{facts['cached_tokens']} of {facts['input_tokens']} prompt tokens came from the prefix cache")
    return lines
