"""Output of commands: JSON lines, facts for people on stderr, and progress while a model is fetched and loaded."""

import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import typer

from twostroke.system import strict_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from twostroke.api.llm import LLM
    from twostroke.engine.timings import Pace

FIRST_LINE_S, LINE_INTERVAL_S = 2.0, 5.0  # seconds until the first line, and between lines

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
TIER_NAMES = {"pool": "the pool", "host": "the host", "disk": "disk", "remote": "the remote store"}


def print_json(value: Any) -> None:
    """One line on stdout."""
    typer.echo(strict_json.dumps(value))


def write(text: str) -> None:
    """Text on stdout, at once. Nothing if stdout is closed."""
    if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stdout.write(text)
        sys.stdout.flush()


def discard_stdout() -> None:
    """Drop what stdout has not taken, or the interpreter would try again, and complain, at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stderr_console() -> "Console":
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """One line on stderr, dim on a terminal."""
    stderr_console().print(text, style="dim", markup=False, soft_wrap=True)


def print_lines(lines: Iterable[str], style: str = "") -> None:
    """Texts on stdout, a line each: nothing in them is markup, and none is folded."""
    from rich.console import Console

    console = Console(highlight=False)
    for line in lines:
        console.print(line, style=style, soft_wrap=True, markup=False)


def table_of(*columns: str, title: str = "", **settings: Any) -> "Table":
    """A table without lines. Columns whose names begin with > have numbers."""
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=None, header_style="bold", **settings)
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    return table


@contextmanager
def progress_bar(title: str, total: int) -> Generator[Callable[..., None]]:
    """A bar on stderr where that is a terminal.

    Yields what is called when one more of `total` is done, or with how many are; and with what else is told of them.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = stderr_console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)

        def update(done: int | None = None, told: str = "") -> None:
            bar.update(task, advance=1 if done is None else None, completed=done, description=title + told)

        yield update


def latency_table(facts: Mapping[str, Any], form: str) -> "Table":
    """TTFT, ITL, TPOT, E2E and the queue in milliseconds, each in the form of a format string."""
    table = table_of("ms", ">mean", ">p50", ">p90", ">p99")
    for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s", "queue_s"):
        cells = [facts[name][column] for column in ("mean", "p50", "p90", "p99")]
        if cells[0] is not None:
            table.add_row(name.removesuffix("_s").upper(), *(f"{cell * 1e3:{form}}" for cell in cells))
    return table


def rates_text(facts: Mapping[str, Any]) -> str:
    """How many requests there were, in what time, and the rates."""
    return (
        f"{facts['completed']:,} of {facts['sent']:,} requests in {facts['duration_s']:,.1f} s: "
        f"{facts['requests_per_second'] or 0:,.2f} requests/s, {facts['output_tokens_per_second'] or 0:,.1f} generated "
        f"and {facts['total_tokens_per_second'] or 0:,.1f} tokens/s in all"
    )


def goodput_text(facts: Mapping[str, Any]) -> str:
    """The goodput within the objectives that were given."""
    met = {name: facts["objectives"][f"{name}_s"] for name in ("ttft", "itl")}
    wanted = " and ".join(f"{name.upper()} of {limit * 1e3:g} ms" for name, limit in met.items() if limit is not None)
    return f"goodput {facts['goodput']:,.2f} requests/s within {wanted}"


def size(count: int) -> str:
    """Bytes for people."""
    value, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{count:,} bytes" if units[0] == "bytes" else f"{value:.1f} {units[0]}"


def tier_hits_text(by_tier: Mapping[str, int]) -> str:
    """The tiers in which cached prompt tokens were found, in words; empty if there are none."""
    return ", ".join(f"{by_tier[tier]:,} from {words}" for tier, words in TIER_NAMES.items() if by_tier.get(tier))


def tiers_text(llm: "LLM") -> str:
    """The tiers of a model's KV and their sizes, in words."""
    tiers = llm.tiers
    parts = [f"{size(llm.pool.num_pages * llm.pool.page_bytes)} in the pool"]
    if tiers.host_bytes:
        parts.append(f"{size(tiers.host_bytes)} in ordinary memory")
    for store in tiers.stores:
        most = "" if store.most_bytes is None else f"{size(store.most_bytes)} "
        parts.append(f"{most}{'on disk in' if store.tier == 'disk' else 'remote at'} {store.where}")
    return ", ".join(parts)


def pace_text(pace: "Pace") -> str:
    """The speeds of both strokes in a few words."""
    parts = []
    if pace.ttft_s is not None and pace.prefill_tokens_per_second is not None:
        parts.append(f"prefill {pace.prefill_tokens_per_second:.1f} tok/s, TTFT {pace.ttft_s * 1e3:.1f} ms")
    if pace.decode_tokens_per_second and pace.itl_mean_s and pace.itl_p99_s:
        itl = f"ITL mean {pace.itl_mean_s * 1e3:.1f} ms, p99 {pace.itl_p99_s * 1e3:.1f} ms"
        parts.append(f"decode {pace.decode_tokens_per_second:.1f} tok/s, {itl}")
    return " | ".join(parts)


def cut_text(made: int, max_tokens: int | None) -> str:
    """Why an answer of `made` tokens was cut, and what to do."""
    if max_tokens is not None and made >= max_tokens:
        return f"the answer is cut after {made:,} tokens: --max-tokens allows no more"
    return f"the answer is cut after {made:,} tokens: there is no room for more in the context or in --kv-bytes"


class AnswerWriter:
    """Writes one answer. Its thought is dim on a terminal, and left out elsewhere, where the answer is piped on."""

    def __init__(self, out: TextIO | None) -> None:
        self._out, self._thinking = out, False

    def write(self, thought: str, answer: str) -> None:
        """Write what is new of both, at once."""
        if self._out is None:
            return
        if thought and self._out.isatty():
            self._out.write(f"{DIM}{thought}{PLAIN}")
            self._thinking = True
        if answer and self._thinking:
            self._out.write("\n\n")
            self._thinking = False
        self._out.write(answer)
        self._out.flush()


class ProgressDisplay:
    """While it is open: a spinner on a terminal; once called with progress in bytes, a bar.

    Without a terminal it writes a line after `FIRST_LINE_S`, and more while something changes, at intervals that double
    from `LINE_INTERVAL_S` on: no wait is silent, and a log of a long one stays short. `announced`: the title is known.
    """

    def __init__(self, title: str, *, announced: bool = False) -> None:
        self._title = title
        self._console = stderr_console()
        self._status = self._console.status(title) if self._console.is_terminal else None
        self._progress: Progress | None = None
        self._stage: str | None = None
        self._line = f"{title} ..."
        self._written = self._line if announced else ""
        self._ended = threading.Event()
        self._writer = threading.Thread(target=self._write_lines, daemon=True)

    def __enter__(self) -> "ProgressDisplay":
        if self._status is not None:
            self._status.start()
        else:
            self._writer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        if self._status is None:
            self._writer.join()
        for display in (self._status, self._progress):
            if display is not None:
                display.stop()

    def _write_lines(self) -> None:
        wait, interval = FIRST_LINE_S, LINE_INTERVAL_S
        while not self._ended.wait(wait):
            wait = LINE_INTERVAL_S
            if self._line != self._written:
                self._written = self._line
                self._console.print(self._line, markup=False, soft_wrap=True)
                wait, interval = interval, 2 * interval

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report how far a download or the loading is, in bytes. Any thread may call it."""
        if self._status is None:
            self._line = f"{stage}: {size(done)} of {size(total)}"
            return
        if self._progress is None:
            self._status.stop()
            self._progress = _bar(self._console)
            self._task = self._progress.add_task(stage, total=total)
            self._progress.start()
        self._progress.update(self._task, description=stage, completed=min(done, total), total=total)
        if done >= total and stage != self._stage:
            self._progress.refresh()


def _bar(console: "Console") -> "Progress":
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
