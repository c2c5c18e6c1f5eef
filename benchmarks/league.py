"""The league of KV techniques: right answers, KL, bytes and times, by model, task and length. Resumable.

    python -m benchmarks.league --models smollm2-135m qwen2.5-coder-0.5b --lengths 2000 --minutes 60

Each cell (model, task, length) is a run of `twostroke eval`: quality of many items, and times of one item. Cells share
the minutes: what one leaves goes to the next. The same command goes on where the last one stopped; with `--minutes 0`
nothing is run. At the end the page (docs/results/league.md, its plots, benchmarks/results/league-DATE.json) is made of
all cells that the directory has, whatever models were asked for.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks.eval_runs import file_name, share_minutes, words
from benchmarks.league_page import write
from benchmarks.results_file import RESULTS
from benchmarks.terminal import command_line, say

TASKS = ("ruler", "longbench")
FAST = (
    "plain", "streaming", "snapkv", "snapkv-by-head", "tova", "chunkkv", "finch", "keydiff", "key-norms", "lagkv",
    "curdkv", "rkv", "q-filters", "duo-attention",
)  # fmt: skip
# Their choice takes several prefills, or is in numpy over all pairs of tokens.
SLOW = (
    "critical-kv", "critical-kv:budgets=ada", "attention-matching", "heavy-hitters", "expected-attention",
    "triattention", "d2o", "kvzip", "kvzip:budgets=ada",
)  # fmt: skip
MAX_SLOW_LENGTH = 4000
MEASURES = {"serving": "serving", "quality": "answers,divergence"}  # names here, and measures of `eval`


@dataclass(frozen=True)
class Cell:
    model: str
    task: str
    length: int

    @property
    def name(self) -> str:
        return f"{file_name(self.model)}-{self.task}-{self.length}"

    def command(self, measured: str, options: argparse.Namespace, minutes: float) -> list[str]:
        """A run of `twostroke eval`, whose directory is of this cell, these methods and these budgets."""
        names = () if options.quick or self.length > MAX_SLOW_LENGTH else SLOW
        slow = [f"{name}{',' if ':' in name else ':'}ratio={options.slow_budget}" for name in names]
        methods = options.methods or ",".join((*FAST, *slow))
        items = 1 if measured == "serving" else options.items
        asked = {
            "model": self.model, "length": self.length, "methods": methods, "budgets": options.budgets,
            "baseline": "plain", "measure": MEASURES[measured], "limit": items, "batch": 1, "seed": options.seed,
            "positions": 24, "kv-bytes": options.kv_bytes, "threads": options.threads, "minutes": f"{minutes:.1f}",
            "output": options.output / self.name / measured,
        }  # fmt: skip
        return words(["eval", self.task], asked, "--no-timings")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[2000], help="tokens of a prompt (default 2000)")
    parser.add_argument("--minutes", type=float, default=60, help="of all cells together (default 60)")
    parser.add_argument("--items", type=int, default=52, help="most items of a cell's quality (default 52)")
    parser.add_argument("--measure", nargs="+", default=list(MEASURES), choices=MEASURES)
    parser.add_argument("--methods", help=f"as in eval; default: all, the quick ones above {MAX_SLOW_LENGTH} tokens")
    parser.add_argument("--quick", action="store_true", help="the quick ones at any length: several times the items")
    parser.add_argument("--budgets", default="0.5,0.25,0.1", help="shares of the prompt that stay (default all three)")
    parser.add_argument("--slow-budget", type=float, default=0.25, help="that of the slow ones (default 0.25)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv-bytes", default="2GiB")
    parser.add_argument("--output", type=Path, default=RESULTS / "league", help="where cells are kept")
    parser.add_argument("--page", type=Path, default=Path("docs/results/league.md"))
    options = parser.parse_args()
    cells = [Cell(*one) for one in product(options.models, options.tasks, options.lengths)]
    steps = {f"{cell.name}, {one}": partial(cell.command, one, options) for one in options.measure for cell in cells}
    share_minutes(steps, options.minutes)
    say(write(options.output, options.page))


if __name__ == "__main__":
    main()
