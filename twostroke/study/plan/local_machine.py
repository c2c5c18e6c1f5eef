"""The machine at hand as a machine of plans: measured once, and kept in a file under the user's directory."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path

from twostroke.backends.native import library
from twostroke.errors import InvalidRequest
from twostroke.study.plan.machine_benchmark import MachineMeasurement, measure_machine
from twostroke.study.roofline.machines import MachineSpec, find_machine
from twostroke.system.atomic_files import atomic_replace
from twostroke.system.home import home
from twostroke.system.limits import usable_cores
from twostroke.system.machine import cpu_model

HERE = "here"


def machine_for(
    name: str, efficiency: float | None = None, progress: Callable[[str], None] = lambda _: None
) -> MachineSpec:
    """The machine of that name, a file of one, or "here": this one, which is measured if it has not been yet.

    Raises InvalidRequest as `find_machine` and `measure`.
    """
    if name != HERE:
        return find_machine(name, efficiency)
    path = kept_at()
    if not path.is_file():
        keep(measure_machine(progress=progress), path)
    return replace(find_machine(str(path), efficiency), name=HERE)


def kept_at() -> Path:
    """Where measurements of this processor, its number of cores and these kernels are kept."""
    if (reason := library.unavailable()) is not None:
        raise InvalidRequest(f"this machine is measured with the native kernels, and {reason}")
    variant = library.variants()[0]
    text = f"{cpu_model()} {usable_cores()} {variant}"
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    digest = blake2b(f"{text} {library.digest(variant)}".encode(), digest_size=4).hexdigest()
    return home() / "machines" / f"{name}-{digest}.json"


def keep(one: MachineMeasurement, path: Path) -> None:
    """Write a file that `--on` takes: `compute`, `memory` and `link` are fractions of what was measured, and may be
    changed where one's own is never reached. Raises OSError."""
    when = datetime.now(UTC).isoformat(timespec="minutes")
    table = {
        "title": f"{cpu_model()}, {one.threads} threads",
        "source": f"measured here with {one.backend}, {when}",
        "kind": "cpu",
        "memory_gb": one.memory / 1e9,
        "bandwidth_tbs": one.bandwidth / 1e12,
        "tflops": {dtype: rate / 1e12 for dtype, rate in one.flops.items()},
        "disk_gbs": one.disk / 1e9,
        "loopback_gbs": one.loopback / 1e9,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replace(path) as file:
        file.write(json.dumps(table | dict.fromkeys(("compute", "memory", "link"), 1.0), indent=1).encode())
