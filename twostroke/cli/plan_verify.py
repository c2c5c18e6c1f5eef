"""`twostroke plan --measure` keeps what this machine can do; `--verify` shows predictions beside measurements."""

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from twostroke.cli.parsers import require_directory
from twostroke.cli.report import note, print_json, print_lines, stderr_console, table_of
from twostroke.errors import InvalidRequest
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.study.plan import verification_cells
from twostroke.study.plan.local_machine import keep, kept_at
from twostroke.study.plan.machine_benchmark import measure_machine
from twostroke.study.plan.verify import LIMIT, Verification, verify
from twostroke.system import strict_json
from twostroke.system.atomic_files import atomic_replace
from twostroke.system.machine import describe


def run_measure(threads: int | None, output: Path | None, as_json: bool) -> None:
    """Measure, show and keep. `output` is a file besides; --on takes it on any machine."""
    require_directory("--output", output)  # before a minute is spent
    path = kept_at()
    note("measuring this machine for about 40 s: it should be quiet")
    with stderr_console().status("measuring") as status:
        one = measure_machine(threads, status.update)
    for kept in (path, *([output] if output else [])):
        keep(one, kept)
    facts = {
        "backend": one.backend,
        "threads": one.threads,
        "flops": one.flops,
        "decode_bytes_per_second": one.decode,
        "kv_bytes_per_second": one.kv,
        "disk_read_bytes_per_second": one.disk,
        "loopback_bytes_per_second": one.loopback,
        "memory_bytes": one.memory,
        "kept": str(path),
    }
    if as_json:
        print_json(facts)
        return
    rates = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in one.flops.items())
    decode = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in one.decode.items())
    lines = (
        f"{one.backend}, {one.threads} threads",
        f"prefill: {rates} GFLOP/s in 512 rows",
        f"decode: weights of {decode} GB/s in one row, KV {one.kv / 1e9:.1f} GB/s",
        f"disk: {one.disk / 1e9:.2f} GB/s; loopback: {one.loopback / 1e9:.2f} GB/s",
        f"kept in {path}; plans --on here use it",
    )
    print_lines(lines)


MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
SECONDS, QUICK_SECONDS = 330.0, 80.0  # for a model
DEFINITIONS = {
    "predicted_s": "from steps of other shapes and requests of other lengths, timed in turn with the cells",
    "measured_s": "median of raw_s, one value a round; of an ITL, each value is a median over gaps (mixed: a mean)",
    "error": "predicted / measured - 1",
    "ttft_error, itl_error": "means of the absolute errors of a model's cells; both must be at most `limit`",
    "unsteadiness": "of a decode step that is timed once a round: (slowest - fastest) / median",
    "others_cpu": "processor time of other processes while it ran, in cores",
}


def run(
    models: list[str], quick: bool, seconds: float | None, threads: int | None, output: Path | None, as_json: bool
) -> None:
    """Verify models one after the other, and keep each as soon as it is measured. Exits with 1 if one does not hold."""
    if seconds is not None and not seconds >= 1:
        raise InvalidRequest(f"--seconds must be at least 1, not {seconds:g}")
    require_directory("--output", output)
    if output is not None and output.exists():
        _known(output)
    budget = seconds or (QUICK_SECONDS if quick else SECONDS)
    found: list[Verification] = []
    names = [name for one in models for name in one.split(",")] or list(MODELS)
    for name in names:
        open_checkpoint(name)  # an unknown name ends it before minutes are spent
    for name in names:
        note(f"{name}: calibrating and measuring for about {budget:.0f} s")
        with stderr_console().status(name) as status:  # shown on a terminal alone
            cells = verification_cells.QUICK if quick else verification_cells.CELLS
            found.append(verify(name, cells, budget, threads, status.update))
        if not as_json:
            _print(found[-1])
        if output is not None:
            save(output, found[-1])
    if as_json:
        print_json({"definitions": DEFINITIONS, "models": [one.as_dict() for one in found]})
    if not all(one.holds for one in found):
        raise typer.Exit(1)


def _known(output: Path) -> dict[str, Any]:
    """Models that a file of results has already."""
    try:
        return dict(json.loads(output.read_text())["models"])
    except (OSError, ValueError, TypeError, KeyError):
        raise InvalidRequest(f"--output {output} exists and is no file of results: name another") from None


def save(output: Path, one: Verification) -> None:
    """Write a model's raw numbers; others that the file has stay."""
    known = _known(output) if output.exists() else {}
    known[one.model] = one.as_dict() | describe()
    text = strict_json.dumps({"definitions": DEFINITIONS, "models": known}, indent=1)
    with atomic_replace(output) as file:
        file.write(f"{text}\n".encode())


def _print(one: Verification) -> None:
    columns = ("cell", "", ">predicted ms", ">measured ms", ">error", ">rounds")
    table = table_of(*columns, title=one.model, title_style="bold")
    for result in one.results:
        if result.median is None or result.error is None:
            continue
        table.add_row(
            result.cell.name,
            result.figure,
            f"{1e3 * result.predicted:,.2f}",
            f"{1e3 * result.median:,.2f}",
            f"{result.error:+.1%}",
            str(len(result.measured)),
        )
    Console(highlight=False).print(table)
    print_lines(remarks(one))


def remarks(one: Verification) -> list[str]:
    """The verdict, and what limits its validity."""
    errors = {name: one.error(name) for name in ("TTFT", "ITL")}
    shown = ", ".join(f"{name} {'not measured' if e is None else f'{e:.1%}'}" for name, e in errors.items())
    verdict = "holds" if one.holds else "does not hold"
    lines = [f"{one.model}: mean absolute error {shown}; at most {LIMIT:.0%} of each was promised: {verdict}"]
    if not one.quiet:
        lines.append(f"not quiet: other processes took {one.others:.1f} cores, so this says little: run it alone")
    if one.unsteadiness > LIMIT:
        lines.append(f"not steady: a decode step differed by {one.unsteadiness:.0%} between rounds")
    reasons = dict.fromkeys(one.left_out.values())
    for reason in reasons:
        names = [name for name, why in one.left_out.items() if why == reason]
        lines.append(f"left out ({reason}): {'; '.join(names)}")
    return lines
