"""Lines of the package by room, against its budget, and against another commit: python tools/sizes.py [COMMIT].

Without a commit it compares with `main`, or `origin/main`, where git has one and the checkout differs from it.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGET = 50_000  # lines of twostroke/, comments and blank ones among them
ROOMS_OF_ROOMS = ("backends", "cluster", "kv", "models", "server", "study")


def room(path: str) -> str:
    """The room of a file of the package: its folder, two levels deep where a room is divided."""
    parts = path.split("/")[1:-1]
    return "/".join(parts[: 2 if parts and parts[0] in ROOMS_OF_ROOMS else 1]) or "."


def lines_now() -> Counter[str]:
    found: Counter[str] = Counter()
    for path in (ROOT / "twostroke").rglob("*.py"):
        found[room(str(path.relative_to(ROOT)))] += len(path.read_bytes().splitlines())
    return found


def lines_at(commit: str) -> Counter[str] | None:
    """The lines of a commit; None if git has no such commit."""
    command = ["git", "grep", "--count", "-e", "", commit, "--", "twostroke/*.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    found: Counter[str] = Counter()
    for line in done.stdout.splitlines():
        _, path, count = line.rsplit(":", 2)
        found[room(path)] += int(count)
    return found


def table(now: Counter[str], before: Counter[str] | None) -> list[str]:
    """A row for each room, the largest first, and the total with what is left of the budget."""
    rooms = sorted(now | (before or Counter()), key=lambda name: (-now[name], name))
    total = now.total()
    rows = [(name, now[name], now[name] - before[name] if before else 0) for name in rooms]
    rows.append(("twostroke", total, total - before.total() if before else 0))
    lines = [f"{name:<28}{count:>8,}{f'{change:+,}' if change else '':>8}" for name, count, change in rows]
    left = BUDGET - total
    return [*lines, f"{abs(left):,} lines {'below' if left >= 0 else 'OVER'} the budget of {BUDGET:,}"]


if __name__ == "__main__":
    given = sys.argv[1:2]
    compared = next((found for name in given or ("main", "origin/main") if (found := lines_at(name)) is not None), None)
    if given and compared is None:
        sys.exit(f"error: git has no commit {given[0]}")
    print("\n".join(table(lines_now(), compared)))
