"""A description of the machine for measurements."""

import os
import platform
import resource
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from twostroke.system.limits import usable_cores


def peak_rss_bytes() -> int:
    """The peak resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def cpu_model() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def busy_seconds() -> float:
    """Processor time of everything on the machine so far, including time that the hypervisor gave to others (steal).

    0 where the system does not tell.
    """
    try:
        user, nice, system, _idle, _wait, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def describe(device: str = "cpu") -> dict[str, Any]:
    """Date, processor, accelerator and versions."""
    gpu = None
    if device.startswith("cuda"):
        import torch

        gpu = torch.cuda.get_device_name(device)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": cpu_model(),
            "cores": usable_cores(),
            "gpu": gpu,
            "python": platform.python_version(),
            "numpy": version("numpy"),
            "torch": version("torch") if find_spec("torch") else None,
        },
    }
