"""Options of what is asked and when, for commands that send it, count it or simulate it."""

import re
import secrets
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke.cli.options import checked, choice_settings
from twostroke.fields import LARGE, Rule

if TYPE_CHECKING:
    from twostroke.study.traffic.requests import Traffic

WORKLOADS = choice_settings(("synthetic", "sharegpt"))
REQUESTS = 100  # where nobody says how many
MAX_REQUESTS = 10_000_000  # each is made beforehand
WEIGHTS_HELP = (
    "bf16, fp8-w8a8, int8-w8a8, nvfp4-w4a4, int4-w4a8, int4-w4a16 or mxfp4-w4a16. "
    "W4A8 has 4 bits of weights and products in 8."
)
TRACE_HELP = "Requests of Mooncake's (JSON lines), Azure's (2023, 2024) or BurstGPT's (CSV) traces."


def parse_range(text: str) -> Any:
    """`512`, or `128-1024`."""
    from twostroke.study.traffic.workload_sampler import TokenRange

    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", str(text))
    if match is None:
        raise typer.BadParameter(f"{text!r} is no number: write 512, or 128-1024")
    found = TokenRange(int(match[1]), int(match[2] or match[1]))
    if not 1 <= found.least <= found.most:
        raise typer.BadParameter(f"{text!r} must go from 1 or more upwards")
    return found


above_zero = checked(Rule(float, above=0, most=LARGE, optional=True))
zero_or_more = checked(Rule(float, least=0, most=LARGE, optional=True))
load_option = partial(typer.Option, rich_help_panel="Load")
Burstiness = Annotated[
    float,
    load_option(callback=above_zero, help="Shape of the gamma-distributed gaps: 1 is Poisson, less comes in bursts."),
]

_workload = partial(typer.Option, rich_help_panel="Workload")
Tokens = Any
Number = float | None


@dataclass(frozen=True)
class TrafficOptions:
    """Requests: drawn, or those of a trace. Every option has the same meaning wherever it is offered."""

    rate: Annotated[
        Number,
        load_option(callback=above_zero, help="Requests per second, in open loop.", show_default="a trace's own"),
    ] = None
    burstiness: Burstiness = 1.0
    concurrency: Annotated[int | None, load_option(min=1, help="Requests in flight at any time, in closed loop.")] = (
        None
    )
    requests: Annotated[
        int | None,
        load_option(
            min=1, max=MAX_REQUESTS, help="How many are measured.", show_default=f"{REQUESTS}, or all of a trace"
        ),
    ] = None
    workload: Annotated[str, _workload(help="sharegpt: lengths as in its conversations.", **WORKLOADS)] = "synthetic"
    trace: Annotated[Path | None, _workload(metavar="FILE", help=TRACE_HELP, show_default="none")] = None
    input_tokens: Annotated[
        Tokens,
        _workload(parser=parse_range, metavar="N|N-N", help="Prompt lengths, after a prefix.", show_default="512"),
    ] = None
    output_tokens: Annotated[
        Tokens, _workload(parser=parse_range, metavar="N|N-N", help="Answer lengths.", show_default="64")
    ] = None
    prefix_tokens: Annotated[int, _workload(min=0, help="How many first tokens the prompts of a group share.")] = 0
    groups: Annotated[
        int, _workload(min=1, max=MAX_REQUESTS, help="How many groups there are; each has its own prefix.")
    ] = 1
    seed: Annotated[
        int | None,
        _workload(min=0, help="Of prompts and arrivals. The same prompts again may be cached.", show_default="fresh"),
    ] = None

    def check(self) -> None:
        """Raises BadParameter."""
        if self.trace is None and (self.rate is None) == (self.concurrency is None):
            raise typer.BadParameter("say either --rate (open loop) or --concurrency (closed loop)")
        if self.rate is not None and self.concurrency is not None:
            raise typer.BadParameter("say --rate (open loop) or --concurrency (closed loop), not both")
        if self.workload not in ("synthetic", "sharegpt"):
            raise typer.BadParameter("synthetic or sharegpt", param_hint="--workload")
        lengths = (self.input_tokens, self.output_tokens) != (None, None)
        if self.workload == "sharegpt" and lengths:
            raise typer.BadParameter("sharegpt sets the lengths: leave out --input-tokens and --output-tokens")
        drawn = lengths or self.prefix_tokens or self.workload != "synthetic" or self.burstiness != 1
        if self.trace is not None and drawn:
            raise typer.BadParameter("a trace has its own lengths, prefixes and times: leave out what draws them")

    def traffic(self) -> "Traffic":
        """The requests. Raises InvalidRequest for a trace that is none."""
        from twostroke.study.traffic.requests import ClosedLoop, OpenLoop
        from twostroke.study.traffic.trace import read_trace
        from twostroke.study.traffic.workload_sampler import WorkloadSampler

        self.check()
        closed = None if self.concurrency is None else ClosedLoop(self.concurrency)
        seed = secrets.randbits(32) if self.seed is None else self.seed
        if self.trace is not None:
            found = read_trace(self.trace, self.requests, seed)
            if closed is not None:
                return found.in_closed_loop(closed)
            return found if self.rate is None else found.at_rate(self.rate)
        synthetic = self.workload == "synthetic"
        return WorkloadSampler(
            self.requests or REQUESTS,
            (self.input_tokens or parse_range("512")) if synthetic else None,
            (self.output_tokens or parse_range("64")) if synthetic else None,
            self.prefix_tokens,
            self.groups,
            seed,
        ).traffic(closed or OpenLoop(self.rate or 1, self.burstiness))

    def describe(self, traffic: "Traffic") -> dict[str, Any]:
        """What the requests were, for a report."""
        drawn = "sharegpt" if self.workload == "sharegpt" else None
        lengths = {"inputs": self.input_tokens or 512, "outputs": self.output_tokens or 64}
        kind = {name: str(drawn or one) for name, one in lengths.items()}
        if self.trace is not None:
            kind = {"trace": self.trace.name, "stretched": self.rate is not None}
        means = {"mean_prompt": float(traffic.prompts.mean()), "mean_answer": float(traffic.outputs.mean())}
        shared = {"prefix_tokens": self.prefix_tokens, "groups": self.groups if self.prefix_tokens else 0}
        return {"requests": len(traffic.arrivals), "requests_per_second": traffic.rate} | kind | means | shared
