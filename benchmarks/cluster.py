"""Prefill and decode in two processes against one, behind NVIDIA Dynamo's front end: `make bench-cluster`.

    python -m benchmarks.cluster --model smollm2-135m

On two cores a worker has one thread, and the one process that it is compared with has two. Parts:

    apart      streams decode while long prompts arrive: TTFT, ITL, throughput
    hop        what the way of a request costs by the length of its prompt: one process, a front end before it, KV
               that crosses
    routing    questions about shared documents over two workers: by the prefix indexes, and in turn
    migration  the longest gap of a stream whose worker is killed, in ITLs

Every setting is saved as soon as it is measured. A part that fails does not keep the others from being measured, and a
part that is measured again replaces its earlier results of the day alone.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.cluster_load import Load, apart, hop, migration, routing
from benchmarks.cluster_tables import table
from benchmarks.local_cluster import LocalCluster
from benchmarks.results_file import earlier, save
from benchmarks.server_process import ServerProcess, our_server
from benchmarks.terminal import command_line, needs

DEFINITIONS = {
    "ttft_s": "first token - arrival, of the long prompts in `apart`, else of all; a median in `hop`",
    "itl_s": "gaps between the tokens of the streams while long prompts are under way; in `migration` the median",
    "tokens_per_second": "prompt and output tokens until the last long prompt is answered / the time until then",
    "bytes": "of K and V that crossed for a prompt",
    "seconds_with_prefill": "from the claim to the value, the rest of the prefill included",
    "cached_share": "prompt tokens found in a prefix index / prompt tokens",
    "stall_s": "longest gap of a stream whose worker is killed",
    "stall_itls": "median of these / median gap of an undisturbed stream",
}

Figures = Iterator[tuple[str, dict[str, Any]]]  # of each setting of a part


@dataclass(frozen=True)
class Bench:
    """Measures parts of one model. Every part is a method that yields its settings with their figures."""

    model: str
    folder: Path
    longs: int
    rounds: int
    questions: int
    kills: int

    def apart(self) -> Figures:
        with self._one_process(2) as server:
            yield "one process, two threads", apart(self._load(server.url, 1), self.longs)
        with self._cluster("split", ["prefill", "decode"]) as made:
            yield "prefill and decode apart", apart(self._load(made.url, 1), self.longs)

    def hop(self) -> Figures:
        with self._one_process(1) as server:
            yield "one process, one thread", hop(self._load(server.url, 100), self.rounds, None)
        with self._cluster("front", ["both"]) as made:
            yield "a front end before it", hop(self._load(made.url, 100), self.rounds, None)
        with self._cluster("crosses", ["prefill", "decode"]) as made:
            yield "KV crosses", hop(self._load(made.url, 100), self.rounds, made.workers[1])

    def routing(self) -> Figures:
        for router, events in (("round-robin", None), ("kv", "zmq")):
            with self._cluster(router, ["both", "both"], router=router, events=events) as made:
                yield router, routing(self._load(made.url, 200), self.questions)

    def migration(self) -> Figures:
        with self._cluster("migration", ["both", "both"]) as made:
            load = self._load(made.url, 300)
            yield "kill -9", migration(load, self.kills, made, lambda: made.add("--role", "both"))

    def _load(self, url: str, seed: int) -> Load:
        from twostroke.models.checkpoints.resolve import open_checkpoint

        return Load(open_checkpoint(self.model).config.vocab_size, url, self.model, seed)

    def _one_process(self, threads: int) -> ServerProcess:
        return our_server(self.folder, *self._options(threads))

    @contextmanager
    def _cluster(self, name: str, roles: Sequence[str], **options: Any) -> Generator[LocalCluster]:
        with LocalCluster(self.folder / name, self.model, **options) as made:
            made.options = self._options(1)
            for role in roles:
                made.add("--role", role)
            made.ready()
            yield made

    def _options(self, threads: int) -> list[str]:
        return ["--model", self.model, "--threads", str(threads), "--kv-bytes", "2GiB"]


PARTS = ("apart", "hop", "routing", "migration")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--longs", type=int, default=8, help="long prompts in `apart`")
    parser.add_argument("--rounds", type=int, default=5, help="prompts of each length in `hop`")
    parser.add_argument("--questions", type=int, default=40, help="in `routing`")
    parser.add_argument("--kills", type=int, default=5, help="in `migration`")
    asked = parser.parse_args()
    for extra, package in (("bench", "httpx"), ("dynamo", "dynamo.llm")):
        with needs(extra):
            import_module(package)
    found, failed = earlier("cluster", asked.model), list[str]()
    with tempfile.TemporaryDirectory(prefix="bench-cluster-") as scratch:
        sizes = (asked.longs, asked.rounds, asked.questions, asked.kills)
        bench = Bench(asked.model, Path(scratch), *sizes)
        for part in asked.parts:
            measured: dict[str, Any] = {}
            try:
                for setting, figures in getattr(bench, part)():
                    measured[setting] = figures
                    found[part] = measured
                    print(f"saved in {save('cluster', DEFINITIONS, asked.model, found)}: {part}, {setting}", flush=True)
            except Exception:
                traceback.print_exc()
                failed.append(part)
            if measured:
                print(f"\n{table(part, measured)}\n", flush=True)
    if failed:
        sys.exit(f"error: {', '.join(failed)} failed")


if __name__ == "__main__":
    main()
