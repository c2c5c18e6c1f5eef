"""Options of `twostroke plan`: what is planned, what is asked of it, and what is measured here instead."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke.cli.parsers import parse_size
from twostroke.cli.traffic import TRACE_HELP, WEIGHTS_HELP, WORKLOADS, Burstiness, load_option, zero_or_more
from twostroke.errors import InvalidRequest

if TYPE_CHECKING:
    from twostroke.study.plan.plan import RequestProfile
    from twostroke.study.traffic.objectives import Objectives
    from twostroke.study.traffic.requests import Traffic

MAX_USERS = 10_000  # each is counted
MAX_RATE = 1_000_000  # requests a second
MIN_BURSTINESS = 0.01  # below it all requests come in a few bursts, and a percentile says nothing
_here = partial(typer.Option, rich_help_panel="This machine")


def _given(options: Any, names: tuple[str, ...]) -> list[str]:
    """Those of these options that are not what they are if nobody gives them."""
    defaults = type(options)()
    return [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) != getattr(defaults, name)]


@dataclass(frozen=True)
class ConfigurationOptions:
    """The model, the machine, and what advice may change."""

    on: Annotated[
        str | None, typer.Option(help="A named machine, such as h100; a TOML or JSON file of one; or here.")
    ] = None
    weights: Annotated[str | None, typer.Option(help=WEIGHTS_HELP, show_default="as published")] = None
    kv_bits: Annotated[int, typer.Option(help="Bits of a number in the KV cache: 16, 8, or 6 (K of 8, V of 4).")] = 16
    tp: Annotated[int, typer.Option(min=1, help="Devices that share each product (tensor parallelism).")] = 1
    workers: Annotated[int, typer.Option(min=1, help="Workers of so many devices each.")] = 1
    max_step_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step, as of the engine.")] = 512
    max_tp: Annotated[int, typer.Option(min=1, help="Most devices that advice may ask for.")] = 8
    method: Annotated[
        str,
        typer.Option(
            help="How answers are made: plain, repeat, ptdo, drop, overfill, refresh, lookup, speculative-student; "
            "with --draft also speculative-draft and compress, with --draft mtp speculative-mtp."
        ),
    ] = "plain"
    draft: Annotated[
        str | None,
        typer.Option(help="A smaller model with the same tokenizer, named as MODEL; or mtp, the model's own head."),
    ] = None
    acceptance: Annotated[
        float | None, typer.Option(help="Share of guesses that stand.", show_default="as measured, by kind of draft")
    ] = None
    efficiency: Annotated[
        float | None, typer.Option(help="Fraction of the peak rate that products reach.", show_default="the machine's")
    ] = None
    memory_budget: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="BYTES",
            help="Advise weights of prefill, weights of decode and bits of KV for so much memory, such as 4GiB.",
            show_default="no such advice",
        ),
    ] = None
    device_price: Annotated[
        float | None,
        typer.Option(callback=zero_or_more, help="What a device costs an hour.", show_default="not counted"),
    ] = None


@dataclass(frozen=True)
class WorkloadOptions:
    """Requests, their number, and objectives."""

    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 512
    output_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 128
    concurrency: Annotated[
        int | None, typer.Option(help="Sequences that decode at once, without a load.", show_default="1")
    ] = None
    shared_prefix: Annotated[int, typer.Option(help="First tokens of each prompt that are in the prefix index.")] = 0
    ttft_ms: Annotated[float | None, typer.Option(help="Objective for TTFT, in milliseconds.")] = None
    itl_ms: Annotated[float | None, typer.Option(help="Objective for ITL, in milliseconds.")] = None
    percentile: Annotated[float, load_option(help="Of TTFT and ITL, which has to keep the objectives.")] = 99.0
    rate: Annotated[float | None, load_option(help="Requests per second, at random times.")] = None
    burstiness: Burstiness = 1.0
    users: Annotated[int | None, load_option(min=1, help="Users who ask again as soon as they are answered.")] = None
    workload: Annotated[
        str, load_option(help="sharegpt: lengths as in its conversations, in place of the tokens above.", **WORKLOADS)
    ] = "synthetic"
    trace: Annotated[Path | None, load_option(metavar="FILE", help=TRACE_HELP, show_default="none")] = None

    def shape(self) -> "RequestProfile":
        """One request, beside others. Raises InvalidRequest."""
        from twostroke.study.plan.plan import RequestProfile

        at_once = 1 if self.concurrency is None else self.concurrency
        limits = self.ttft_ms, self.itl_ms
        return RequestProfile(self.prompt_tokens, self.output_tokens, at_once, self.shared_prefix, *limits)

    def objectives(self) -> "Objectives":
        """The objectives, in seconds. Raises InvalidRequest."""
        from twostroke.study.traffic.objectives import Objectives

        return Objectives.of_ms(self.ttft_ms, self.itl_ms, self.percentile)

    def traffic(self) -> "Traffic | None":
        """The requests, if a load is asked for. Raises InvalidRequest."""
        from twostroke.study.plan.loads import drawn_traffic
        from twostroke.study.traffic.requests import ClosedLoop
        from twostroke.study.traffic.trace import read_trace

        rate, users = self.rate, self.users
        if rate is not None and not 0 < rate <= MAX_RATE:
            raise InvalidRequest(f"--rate must be above 0 and at most {MAX_RATE:,} requests a second, not {rate:g}")
        if self.burstiness < MIN_BURSTINESS:
            raise InvalidRequest(f"--burstiness must be at least {MIN_BURSTINESS:g}, not {self.burstiness:g}")
        if users is not None and users > MAX_USERS:
            raise InvalidRequest(
                f"--users must be at most {MAX_USERS:,}, not {users:,}: plan those of a part of the workers"
            )
        if rate is not None and users is not None:
            raise InvalidRequest("say --rate or --users, not both")
        if self.workload not in ("synthetic", "sharegpt"):
            raise InvalidRequest(f"--workload is synthetic or sharegpt, not {self.workload!r}")
        lengths = ("prompt_tokens", "output_tokens")
        if rate is not None or users is not None or self.trace is not None:
            self._leave_out(("concurrency",), "under a load the simulator says how many decode at once")
        if self.trace is not None:
            drawing = (*lengths, "shared_prefix", "workload", "burstiness")
            self._leave_out(drawing, "a trace has its own lengths, prefixes and times")
            found = read_trace(self.trace)
            if users is not None:
                return found.in_closed_loop(ClosedLoop(users))
            return found if rate is None else found.at_rate(rate)
        if rate is None and users is None:
            if self.workload != "synthetic":
                raise InvalidRequest("--workload sharegpt needs --rate or --users")
            self._leave_out(("burstiness", "percentile"), "a plan without --rate, --users or --trace has no load")
            return None
        if self.workload == "sharegpt":
            self._leave_out(lengths, "sharegpt has its own lengths")
        return drawn_traffic(self.shape(), rate, users, self.burstiness, self.workload == "sharegpt")

    def _leave_out(self, names: tuple[str, ...], why: str) -> None:
        """Raises InvalidRequest if one of these options was given."""
        if given := _given(self, names):
            raise InvalidRequest(f"{why}: leave out {given[0]}")


@dataclass(frozen=True)
class HereOptions:
    """Measurements of this machine in place of a plan."""

    measure: Annotated[
        bool, _here("--measure", help="Instead: measure this machine, in 40 s, for plans --on here.")
    ] = False
    verify: Annotated[
        bool, _here("--verify", help="Instead: run this engine here, and show how far off its predictions are.")
    ] = False
    models: Annotated[
        list[str] | None,
        _here(metavar="MODEL", help="What is verified: names, with commas between.", show_default="three small ones"),
    ] = None
    quick: Annotated[bool, _here("--quick", help="Fewer and shorter cells: 90 s a model, not 6 minutes.")] = False
    seconds: Annotated[float | None, _here(help="For each model.", show_default="330, or 80 if --quick")] = None
    threads: Annotated[int | None, _here(help="CPU threads.", show_default="one for each core")] = None
    output: Annotated[
        Path | None, _here(dir_okay=False, metavar="FILE", help="Keep raw numbers in this file, model by model.")
    ] = None

    def check(self, model: str | None) -> None:
        """Raises InvalidRequest for options that would have no effect."""
        if self.measure and (model or self.verify):
            raise InvalidRequest("--measure measures this machine alone: leave out the model and --verify")
        for of, wanted, names in (
            ("--verify", self.verify, ("models", "quick", "seconds")),
            ("--verify or --measure", self.verify or self.measure, ("threads", "output")),
        ):
            if (given := _given(self, names)) and not wanted:
                raise InvalidRequest(f"{given[0]} belongs to {of}: leave it out")
