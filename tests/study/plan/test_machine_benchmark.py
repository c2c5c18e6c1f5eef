"""The machine at hand: measured, kept, and used by plans."""

from dataclasses import replace
from pathlib import Path

import pytest

from twostroke.backends.native import library
from twostroke.errors import InvalidRequest
from twostroke.study.plan import local_machine, machine_benchmark
from twostroke.study.plan.machine_benchmark import MachineMeasurement
from twostroke.study.roofline.machines import find_machine

FOUND = MachineMeasurement(
    "native-test", 2, {"int8": 5e11, "bf16": 2e11, "attention": 1e11}, {"int8": 2e10, "bf16": 3e10}, 1e10, 1.5e9, 2e9,
    16 << 30,
)  # fmt: skip
needs_kernels = pytest.mark.skipif(library.unavailable() is not None, reason="the native kernels cannot run here")


@needs_kernels
def test_every_rate_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At small sizes: what is reported is positive and finite, and counts what was computed."""
    for name, value in {
        "HIDDEN": 64,
        "INTERMEDIATE": 96,
        "HEADS": 2,
        "HEAD_DIM": 32,
        "ROWS": 32,
        "CONTEXT": 64,
    }.items():
        monkeypatch.setattr(machine_benchmark, name, value)
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(machine_benchmark, "SECONDS", 0.0)
    monkeypatch.setattr(machine_benchmark, "FILE_BYTES", 8 << 20)
    seen: list[str] = []
    found = machine_benchmark.measure_machine(threads=1, progress=seen.append)
    assert set(found.flops) == {"int8", "bf16", "attention"}
    assert found.threads == 1
    rates = [*found.flops.values(), *found.decode.values(), found.kv, found.disk, found.loopback]
    assert all(0 < rate < float("inf") for rate in rates)
    assert seen == ["products of bf16", "products of int8", "disk", "loopback"]


def test_what_is_kept_is_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    local_machine.keep(FOUND, path)
    machine = find_machine(str(path))
    assert (machine.name, machine.kind) == ("own", "cpu")
    assert dict(machine.flops) == pytest.approx(FOUND.flops)
    assert machine.bandwidth == pytest.approx(3e10), "the best of what decode reads"
    assert (machine.disk, machine.loopback) == pytest.approx((1.5e9, 2e9))
    assert (machine.compute, machine.memory_share) == (1, 1)
    assert machine.dtype(("attention",)) == "attention"
    assert find_machine(str(path), 0.5).compute == 0.5


@needs_kernels
def test_here_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path))
    times: list[int] = []

    def measure(**_: object) -> MachineMeasurement:
        times.append(1)
        return replace(FOUND, memory=len(times) << 30)

    monkeypatch.setattr(local_machine, "measure_machine", measure)
    first, second = local_machine.machine_for("here"), local_machine.machine_for("here", 0.25)
    assert len(times) == 1
    assert first.memory == second.memory
    assert (first.name, first.compute, second.compute) == ("here", 1.0, 0.25)
    assert local_machine.machine_for("h100").name == "h100"
    monkeypatch.setattr(local_machine, "cpu_model", lambda: "Another processor")
    local_machine.machine_for("here")
    assert len(times) == 2, "another processor is another machine"


def test_without_kernels_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "unavailable", lambda: "they are not compiled")
    with pytest.raises(InvalidRequest, match="measured with the native kernels, and they are not compiled"):
        machine_benchmark.measure_machine()
    with pytest.raises(InvalidRequest, match="not compiled"):
        local_machine.machine_for("here")
