"""Control groups: what a container, or a service, is limited by."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """The folders of this process's group for a controller ("cpu", "memory") and of all groups above it.

    A folder may not be there: a container often sees only a part of the tree, as if it began with its own group.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):  # of the second version, of the first
                for mount in (controllers, "unified" if not controllers else controller):
                    group = root / "sys/fs/cgroup" / mount / path.lstrip("/")
                    yield from (group, *group.parents[: len(Path(path).parts) - 1])
