"""One model, one workload, all engines: loaded one after another, then measured in turn, round by round."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.peer.client import Worker, WorkerFailed
from benchmarks.peer.engines import ENGINES
from benchmarks.peer.environments import CannotSetUp, ensure_environment
from benchmarks.peer.figures import Rates, rates, turn_order
from benchmarks.peer.protocol import Job, Options
from benchmarks.peer.weights import catalog, ensure_weights
from benchmarks.quiet import Others
from twostroke.errors import TwostrokeError
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.models.checkpoints.tokenizer import Tokenizer

SETTLE_S = 1.5  # after a turn: vLLM polls for a second before it sleeps, OpenMP threads spin for some milliseconds
WARMUP_TOKENS = 8  # of output; warm-up prompts have the workload's length, as some engines compile for it


@dataclass(frozen=True)
class Workload:
    """`batch` sequences at once."""

    name: str
    prompt_tokens: int
    output_tokens: int
    batch: int = 1


@dataclass(frozen=True)
class Turn:
    """One measurement. `times` as in `protocol.Generated`; `others_cpu` as in `figures.DEFINITIONS`."""

    rates: Rates
    times: list[list[float]]
    tokens: list[list[int]]
    others_cpu: float


@dataclass
class Measured:
    """All measurements of an engine; `failure` is the reason if there are no more."""

    engine: str
    version: str = ""
    load_s: float = 0.0
    turns: list[Turn] = field(default_factory=list[Turn])
    peak_rss_bytes: int = 0
    idle_cpu_s: float = 0.0
    waited_s: float = 0.0
    failure: str | None = None

    @property
    def rounds(self) -> list[Rates]:
        return [turn.rates for turn in self.turns]

    @property
    def idle_cpu(self) -> float:
        return self.idle_cpu_s / self.waited_s if self.waited_s else 0.0


Say = Callable[[str], None]


class PromptSource:
    """Random tokens, fresh for every round, so that no cache of an engine helps in the next."""

    def __init__(self, model: str, work: Path) -> None:
        checkpoint = open_checkpoint(catalog(model, work))
        tokenizer = Tokenizer.from_source(checkpoint.tokenizer_source)
        ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), list(tokenizer.special_ids))
        self._ordinary = ordinary[ordinary < checkpoint.config.vocab_size]
        self.longest = checkpoint.config.max_position

    def make(self, workload: Workload, round_number: int) -> list[list[int]]:
        seed = [round_number, workload.prompt_tokens, workload.output_tokens, workload.batch]
        rows = np.random.default_rng(seed).choice(self._ordinary, (workload.batch, workload.prompt_tokens))
        return rows.tolist()


def compare(
    model: str,
    workload: Workload,
    engines: Sequence[str],
    rounds: int,
    threads: int,
    work: Path,
    say: Say,
    *,
    amx: bool = True,
    apart: bool = False,
) -> list[Measured]:
    """The measurements of each engine, in the given order. The workers end with this call.

    `apart`: an engine is loaded for each of its turns, and ends behind it, so that no two need memory at once.
    Raises TwostrokeError if the model is not available, or its context is too short for the workload.
    """
    prompts = PromptSource(model, work)
    context = workload.prompt_tokens + workload.output_tokens
    if context > prompts.longest:
        raise TwostrokeError(f"{model} has {prompts.longest} positions, and {workload.name} needs {context}")
    measurements = {name: Measured(name) for name in engines}

    def in_turn(names: Sequence[str], round_numbers: Iterable[int]) -> None:
        """Load these engines, and measure them in these rounds; round 0 warms up."""
        with ExitStack() as stack:
            workers: dict[str, Worker] = {}
            for name in names:
                worker = load(measurements[name], model, context, workload.batch, threads, work, say, amx=amx)
                if worker is not None:
                    workers[name] = stack.enter_context(worker)
            for round_number in round_numbers:
                for name in turn_order(list(workers), round_number):
                    measured = measurements[name]
                    say(f"{model}, {workload.name}: round {round_number} of {rounds}, {name}")
                    others = [(measurements[other], worker) for other, worker in workers.items() if other != name]
                    try:
                        with idleness(others):
                            turn = take_turn(
                                workers[name], prompts.make(workload, round_number), workload, round_number
                            )
                        time.sleep(SETTLE_S)
                        measured.peak_rss_bytes = workers[name].peak_rss_bytes()
                        measured.turns += [turn] if round_number else []
                    except WorkerFailed as failure:
                        measured.failure = str(failure)
                        say(f"{name}: {failure}")
                        workers.pop(name).close()

    if not apart:
        in_turn(engines, range(rounds + 1))
    for round_number in range(1, rounds + 1) if apart else ():
        for name in turn_order(list(engines), round_number):
            if measurements[name].failure is None:
                in_turn([name], (0, round_number))
    return list(measurements.values())


def load(
    measured: Measured,
    model: str,
    context: int,
    sequences: int,
    threads: int,
    work: Path,
    say: Say,
    *,
    amx: bool = True,
) -> Worker | None:
    """A worker that is ready, after setup if necessary. None if it failed; `measured.failure` has the reason."""
    engine = ENGINES[measured.engine]
    try:
        if not amx and engine.without_amx is None:
            raise CannotSetUp("is built for this very processor and can't be told to do without AMX")
        say(f"{model}: loading {engine.name}")
        ensure_environment(engine, work)
        options = Options(ensure_weights(engine, model, work), threads, context, sequences, amx)
        worker = Worker(engine, options, work)
    except (CannotSetUp, WorkerFailed) as failure:
        measured.failure = str(failure)
        say(f"{engine.name}: {failure}")
        return None
    measured.version, measured.load_s = worker.ready.version, worker.ready.load_s
    return worker


def take_turn(worker: Worker, prompts: list[list[int]], workload: Workload, round_number: int) -> Turn:
    """Run one engine once. Raises WorkerFailed."""
    job = Job(prompts, workload.output_tokens if round_number else min(WARMUP_TOKENS, workload.output_tokens))
    others = Others(worker.cpu_seconds)
    answer = worker.answer(job)
    cpu = others.cpu
    return Turn(rates(workload.prompt_tokens, answer.times), answer.times, answer.tokens, cpu)


@contextmanager
def idleness(others: Sequence[tuple[Measured, Worker]]) -> Generator[None]:
    """Record the processor time of waiting workers, which they take from the one that runs."""
    before, began = [worker.cpu_seconds() for _, worker in others], time.perf_counter()
    yield
    elapsed = time.perf_counter() - began
    for (measured, worker), used in zip(others, before, strict=True):
        measured.idle_cpu_s += worker.cpu_seconds() - used
        measured.waited_s += elapsed
