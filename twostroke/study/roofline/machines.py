"""Machines: peak rates, bandwidth, memory and links of one device, and the fractions of them that are expected."""

import json
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from twostroke.errors import InvalidRequest
from twostroke.study.roofline.suggestions import did_you_mean

# Part of the memory for activations and the runtime: an assumption, as in vLLM's gpu_memory_utilization.
RESERVED_SHARE = 0.10


# Times the predicted speed: the least and the most of TensorRT-LLM 1.0's published table (docs/planning.md).
SPREAD = (0.63, 1.10)


@dataclass(frozen=True)
class MachineSpec:
    """One device. Rates are dense and per second."""

    name: str
    title: str
    source: str
    kind: str
    memory: float  # bytes
    bandwidth: float  # bytes/s between memory and processor
    # peak FLOP/s by dtype; "attention", where it is known, is that of scores and weighted values
    flops: Mapping[str, float]
    # link, host: bytes/s one way to another device, and to host memory; None if unknown
    link: float | None
    host: float | None
    # compute, memory_share, link_share: fractions of the peaks that are expected
    compute: float
    memory_share: float
    link_share: float
    link_latency: float | None = None  # seconds that an all-reduce of a few bytes takes; None if unknown
    # disk, loopback: bytes/s read from a disk, and over TCP to itself; None if unknown
    disk: float | None = None
    loopback: float | None = None
    watts: float | None = None  # power of one device; None if unknown
    # times the predicted speed that engines reach at least and at most; (1, 1) where it is known
    spread: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        rates = {"bandwidth": self.bandwidth, "memory": self.memory, **{f"{k} rate": v for k, v in self.flops.items()}}
        for name, value in rates.items():
            if not 0 < value < math.inf:
                raise InvalidRequest(f"machine {self.name} needs a positive {name}, not {value:g}")
        known = {"link": self.link, "host": self.host, "disk": self.disk, "loopback": self.loopback}
        for name, value in known.items():
            if value is not None and not 0 < value < math.inf:
                raise InvalidRequest(f"machine {self.name} needs a positive {name}_gbs, not {value / 1e9:g}, or none")
        if self.link_latency is not None and not 0 <= self.link_latency < math.inf:
            raise InvalidRequest(f"machine {self.name} needs link_us of 0 or more, not {1e6 * self.link_latency:g}")
        for name in ("compute", "memory_share", "link_share"):
            if not 0 < getattr(self, name) <= 1:
                raise InvalidRequest(f"machine {self.name}: efficiency must be above 0 and at most 1 ({name})")
        if "bf16" not in self.flops:
            raise InvalidRequest(f"machine {self.name} needs a rate of bf16 products (tflops.bf16)")

    @property
    def usable_memory(self) -> float:
        """Bytes without what is reserved."""
        return self.memory * (1 - RESERVED_SHARE)

    @property
    def unknown_link(self) -> str:
        """What tensor parallelism needs and is not known, "link_gbs" or "link_us"; empty if nothing is missing."""
        return "link_gbs" if self.link is None else "link_us" if self.link_latency is None else ""

    def dtype(self, wanted: tuple[str, ...]) -> str:
        """The first of these dtypes that the machine multiplies."""
        return next((one for one in wanted if one in self.flops), "bf16")

    def balance(self, dtype: str = "bf16") -> float:
        """FLOPs per byte at which peak rate and bandwidth take the same time (Williams et al. 2009, roofline)."""
        return self.flops[dtype] / self.bandwidth


@cache
def machines() -> Mapping[str, MachineSpec]:
    """All named machines."""
    tables = tomllib.loads(files("twostroke.study.roofline").joinpath("data/machines.toml").read_text())
    return {name: _of_table(name, table) for name, table in tables.items()}


def find_machine(name: str, efficiency: float | None = None) -> MachineSpec:
    """A named machine, or a TOML or JSON file of the same keys. `efficiency` replaces the fraction of compute.

    Raises InvalidRequest for an unknown name (near ones are listed) and for a file without a needed number.
    """
    if name in machines():
        machine = machines()[name]
    elif os.path.isfile(name):
        machine = _of_file(Path(name))
    elif Path(name).suffix in (".toml", ".json"):
        raise InvalidRequest(f"there is no file {name}: name a machine, or a TOML or JSON file of one")
    else:
        hint = did_you_mean(name, machines())
        raise InvalidRequest(f"unknown machine {name!r}: {hint}known are {', '.join(machines())}, or give a file")
    return machine if efficiency is None else replace(machine, compute=efficiency, spread=(1.0, 1.0))


def _of_file(path: Path) -> MachineSpec:
    try:
        text = path.read_text(encoding="utf-8-sig")
        table = (json.loads if path.suffix == ".json" or text.startswith("{") else tomllib.loads)(text)
    except (ValueError, OSError) as error:
        raise InvalidRequest(f"{path}: this is no machine: {error}") from None
    if not isinstance(table, dict):
        raise InvalidRequest(f"{path}: a machine is a table of numbers")
    return _of_table(path.stem, table)


def _of_table(name: str, table: Mapping[str, Any]) -> MachineSpec:
    def number(key: str, scale: float) -> float | None:
        value = table.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(f"machine {name}: {key} must be a number, not {value!r:.40}")
        return value * scale

    def needed(key: str, scale: float) -> float:
        value = number(key, scale)
        if value is None:
            raise InvalidRequest(f"machine {name} has no {key}: no plan can be made without it")
        return value

    rates = table.get("tflops")
    if not isinstance(rates, dict) or not all(type(rate) in (int, float) for rate in rates.values()):
        raise InvalidRequest(f"machine {name} needs tflops, a table of numbers by dtype, such as {{ bf16 = 989 }}")
    return MachineSpec(
        name=name,
        title=str(table.get("title", name)),
        source=str(table.get("source", "")),
        kind=str(table.get("kind", "gpu")),
        memory=needed("memory_gb", 1e9),
        bandwidth=needed("bandwidth_tbs", 1e12),
        flops={dtype: 1e12 * rate for dtype, rate in rates.items()},
        link=number("link_gbs", 1e9),
        host=number("host_gbs", 1e9),
        compute=needed("compute", 1),
        memory_share=needed("memory", 1),
        link_share=number("link", 1) or 1.0,
        disk=number("disk_gbs", 1e9),
        loopback=number("loopback_gbs", 1e9),
        link_latency=number("link_us", 1e-6),
        watts=number("watts", 1),
        spread=SPREAD if needed("compute", 1) < 1 else (1.0, 1.0),
    )
