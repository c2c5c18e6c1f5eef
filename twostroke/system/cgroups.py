"""Control groups, which limit the resources of a container or a service."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """The folders of this process's group for a controller ("cpu", "memory") and of all its parent groups.

    A folder may be missing: a container often sees only a part of the tree, with its own group as the root.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):  # cgroup v2, or v1
                for mount in (controllers, "unified" if not controllers else controller):
                    group = root / "sys/fs/cgroup" / mount / path.lstrip("/")
                    yield from (group, *group.parents[: len(Path(path).parts) - 1])
