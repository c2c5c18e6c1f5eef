"""The memory that a container leaves to a process, on fake machines of a few files."""

from pathlib import Path

import pytest

from twostroke.backends import page_memory as memory_module
from twostroke.backends.page_memory import host_kv_room
from twostroke.engine.model_loader import num_pages
from twostroke.kv.geometry import Geometry
from twostroke.models.layer_groups import LayerGroup
from twostroke.models.rope import Rope
from twostroke.system.limits import available_memory

GIB = 1 << 30
MACHINE = "MemTotal:       67108864 kB\nMemFree:         1048576 kB\nMemAvailable:   33554432 kB\n"  # 32 GiB available
SECOND, FIRST = "0::/system/a.service", "4:cpu,cpuacct:/docker/a\n3:memory:/docker/a"
V1 = "memory/docker/a/memory."
UNLIMITED = "9223372036854771712"


@pytest.mark.parametrize(
    ("groups", "files", "available"),
    [
        ("", {}, 32 * GIB),
        (SECOND, {"system/a.service/memory.max": "max\n", "system/a.service/memory.current": "5"}, 32 * GIB),
        (
            SECOND,
            {"system/a.service/memory.max": f"{8 * GIB}\n", "system/a.service/memory.current": f"{GIB}\n"},
            7 * GIB,
        ),
        (
            SECOND,
            {
                "system/a.service/memory.max": f"{8 * GIB}",
                "system/a.service/memory.current": f"{7 * GIB}",
                "system/a.service/memory.stat": f"anon 17\nactive_file {GIB}\ninactive_file {4 * GIB}\n",
            },
            6 * GIB,
        ),
        (
            SECOND,
            {
                "system/a.service/memory.max": f"{8 * GIB}",
                "system/a.service/memory.high": f"{6 * GIB}",
                "system/a.service/memory.current": f"{GIB}",
            },
            5 * GIB,
        ),
        (  # a parent group is nearer to its limit
            SECOND,
            {
                "system/a.service/memory.max": f"{8 * GIB}",
                "system/a.service/memory.current": f"{GIB}",
                "system/memory.max": f"{16 * GIB}",
                "system/memory.current": f"{13 * GIB}",
            },
            3 * GIB,
        ),
        ("0::/", {"memory.max": f"{GIB}", "memory.current": f"{2 * GIB}"}, 0),  # in a container, past its limit
        ("0::/", {"unified/memory.max": f"{2 * GIB}", "unified/memory.current": f"{GIB}"}, GIB),
        (FIRST, {f"{V1}limit_in_bytes": UNLIMITED, f"{V1}usage_in_bytes": "17"}, 32 * GIB),
        (
            FIRST,
            {
                f"{V1}limit_in_bytes": f"{4 * GIB}",
                f"{V1}usage_in_bytes": f"{3 * GIB}",
                f"{V1}stat": f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n",
            },
            3 * GIB,
        ),
        (FIRST, {"memory/memory.limit_in_bytes": f"{GIB}", "memory/memory.usage_in_bytes": "0"}, GIB),  # mounted there
    ],
)
def test_control_groups(groups: str, files: dict[str, str], available: int, tmp_path: Path) -> None:
    inside = {
        "proc/self/cgroup": groups,
        "proc/meminfo": MACHINE,
        **{f"sys/fs/cgroup/{n}": t for n, t in files.items()},
    }
    for name, text in inside.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_memory(tmp_path) == available


def test_of_this_machine() -> None:
    assert available_memory() > 0
    assert available_memory(Path("/nothing")) > 0, "free memory alone, where nothing more is known"


def test_pages_by_what_a_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the available memory, at most 4 GiB."""
    geometry = Geometry((LayerGroup((0, 1), None, 1, 32, 2),), (Rope(1e4),) * 2, "float32", "")
    for available, kv_bytes in ((1 << 20, 1 << 18), (64 * GIB, 4 * GIB)):
        monkeypatch.setattr(memory_module, "available_memory", lambda available=available: available)
        assert num_pages(geometry, 16, host_kv_room()) == kv_bytes // (16 * geometry.entry_bytes)
