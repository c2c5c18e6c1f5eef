"""`twostroke plan --measure`: what this machine can do, kept for plans `--on here`."""

from pathlib import Path

from rich.console import Console

from twostroke.cli.parsers import require_directory
from twostroke.cli.report import note, print_json, stderr_console
from twostroke.study.plan.local_machine import keep, kept_at
from twostroke.study.plan.machine_benchmark import measure_machine


def run(threads: int | None, output: Path | None, as_json: bool) -> None:
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
    console = Console(highlight=False)
    rates = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in one.flops.items())
    decode = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in one.decode.items())
    for line in (
        f"{one.backend}, {one.threads} threads",
        f"prefill: {rates} GFLOP/s in 512 rows",
        f"decode: weights of {decode} GB/s in one row, KV {one.kv / 1e9:.1f} GB/s",
        f"disk: {one.disk / 1e9:.2f} GB/s; loopback: {one.loopback / 1e9:.2f} GB/s",
        f"kept in {path}; plans --on here use it",
    ):
        console.print(line, soft_wrap=True, markup=False)
