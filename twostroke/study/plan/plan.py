"""One configuration and what it takes: memory, and both strokes without queueing."""

import math
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from twostroke.errors import InvalidRequest
from twostroke.models.cost import SequenceRows
from twostroke.study.roofline.machines import MachineSpec
from twostroke.study.roofline.model_spec import ModelSpec
from twostroke.study.roofline.roofline import Roofline, StepTime
from twostroke.study.roofline.techniques import PLAIN, Technique
from twostroke.study.roofline.weight_formats import WeightFormat

BUDGET = 512  # tokens of a step: the engine's own default
MAX_MS = 86_400_000  # of an objective: a day
MAX_RUNNING = 256  # sequences at once: the engine's own default


@dataclass(frozen=True)
class RequestProfile:
    """What users ask, and what they are promised. Checked on construction."""

    prompt: int
    output: int
    concurrency: int = 1  # sequences that decode at once
    shared: int = 0  # first tokens of each prompt that are known already, in the prefix index
    # ttft_ms, itl_ms: objectives; None for none
    ttft_ms: float | None = None
    itl_ms: float | None = None

    def __post_init__(self) -> None:
        for name, count in (
            ("prompt tokens", self.prompt), ("output tokens", self.output), ("concurrency", self.concurrency)
        ):  # fmt: skip
            if count < 1:
                raise InvalidRequest(f"a plan needs at least 1 of {name}, not {count}")
        if not 0 <= self.shared < self.prompt:
            raise InvalidRequest(f"shared tokens must be from 0 to {self.prompt - 1}, not {self.shared}")
        for name, limit in (("TTFT", self.ttft_ms), ("ITL", self.itl_ms)):
            if limit is not None and not 0 < limit <= MAX_MS:
                raise InvalidRequest(
                    f"an objective of {limit:g} ms for {name} cannot be met: give more than 0 and at most a day"
                )


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes of all devices of a worker together."""

    weights: int  # of the model, and of the companion that the technique needs
    kv_per_user: int  # of a sequence at its end, with states of recurrent layers
    passing: int  # KV that a prefill holds and decode does not, as PTDO's first copy; once, since prefills take turns
    room: int  # for KV, beside the weights and what is reserved; negative if the weights do not fit
    snapshot: int = 0  # of the states of recurrent layers; 0 without any

    @property
    def users(self) -> int:
        return max(0, self.room - self.passing) // self.kv_per_user

    def snapshots(self, sequences: int) -> int:
        """Snapshots of states that have room beside so many sequences. The prefix index keeps them while they have."""
        left = self.room - self.passing - sequences * self.kv_per_user
        return max(0, left) // self.snapshot if self.snapshot else 0


@dataclass(frozen=True)
class Plan:
    """One configuration and what is predicted of it."""

    model: ModelSpec
    machine: MachineSpec
    weights: WeightFormat
    tp: int  # devices that share each product; they are one worker
    workload: RequestProfile
    technique: Technique = PLAIN
    workers: int = 1  # workers of both strokes, or of either where strokes have workers of their own
    prefill_workers: int = 0  # how many of these prefill alone, while the others decode alone; 0 for none
    # budget, max_running: tokens of a step and sequences at once, as the engine's options
    budget: int = BUDGET
    max_running: int = MAX_RUNNING

    @property
    def devices(self) -> int:
        return self.tp * self.workers

    @cached_property
    def roofline(self) -> Roofline:
        return Roofline(self.model, self.machine, self.weights, self.tp)

    @property
    def capacity(self) -> int:
        """Bytes of a worker's devices without what is reserved."""
        return int(self.tp * self.machine.usable_memory)

    @cached_property
    def memory(self) -> PlannedMemory:
        """Memory of a worker for sequences of full length."""
        load, used, roofline = self.workload, self.technique, self.roofline
        weights, held = self.weights.total(self.model), used.held(load.prompt, load.output)
        kv = roofline.held_bytes(held)
        if (companion := used.companion) is not None:
            weights += companion.total(self.weights)
            kv += companion.roofline(roofline).held_bytes(held) if used.own_kv else 0
        passing = max(0, roofline.held_bytes(max(used.entered(load.prompt), 1)) - kv)
        return PlannedMemory(weights, kv, passing, self.capacity - weights, self.model.snapshot_bytes)

    @property
    def fits(self) -> bool:
        return self.memory.users >= self.workload.concurrency

    @property
    def prefill(self) -> StepTime:
        """The prefill of a prompt alone, in one step; its shared tokens are known."""
        return self.technique.prefill(self.roofline, self.workload.prompt, self.workload.shared)

    def decode(self, batch: int | None = None) -> StepTime:
        """What a token of each of `batch` sequences takes on average; None for the workload's concurrency."""
        return self.technique.decode(self.roofline, self.context, batch or self.workload.concurrency)

    @property
    def context(self) -> int:
        """Mean entries before a decoded token; with recurrent layers in the middle of a chunk, as sequences are on
        average."""
        return self.model.typical_length(self.technique.context(self.workload.prompt, self.workload.output))

    def mixed(self, chunk: int, known: int | None = None, others: int | None = None) -> StepTime:
        """A step of chunked prefill: a chunk after `known` entries (None for the prompt's last), and a token of each
        of `others` (None for all other sequences of the workload)."""
        entered = self.technique.entered(self.workload.prompt)
        chunk = min(chunk, entered)
        rows = Counter({SequenceRows(1, self.context, 1): self.workload.concurrency - 1 if others is None else others})
        known = entered - chunk if known is None else known
        rows[SequenceRows(chunk, known, int(known + chunk >= entered))] += 1
        return self.roofline.step(+rows)

    def chunked_ttft(self, chunk: int) -> float:
        """Seconds until the first token if each step has one chunk of the prompt beside the other sequences."""
        entered = self.technique.entered(self.workload.prompt)
        starts = range(self.workload.shared, entered, chunk)
        return sum(self.mixed(min(chunk, entered - start), start).seconds for start in starts)

    def largest_chunk(self) -> int | None:
        """The largest multiple of 16 tokens whose step keeps the objective for ITL; None if none does.

        At most the whole prompt, which is the answer where there is no objective or nobody else decodes.
        """
        entered, limit = self.technique.entered(self.workload.prompt), self.workload.itl_ms
        if limit is None or self.workload.concurrency == 1 or 1e3 * self.mixed(entered).seconds <= limit:
            return entered
        found = bisect_right(range(16, entered, 16), limit, key=lambda chunk: 1e3 * self.mixed(chunk).seconds)
        return 16 * found or None

    @property
    def ttft_ms(self) -> float:
        """Milliseconds of a prefill without queueing."""
        return 1e3 * self.prefill.seconds

    @property
    def ttft_beside_ms(self) -> float:
        """TTFT in chunks that keep the objective for ITL beside the other sequences; infinite if none does."""
        if self.workload.concurrency == 1 or self.workload.itl_ms is None:
            return self.ttft_ms
        chunk = self.largest_chunk()
        return math.inf if chunk is None else 1e3 * self.chunked_ttft(chunk)

    @property
    def itl_ms(self) -> float:
        return 1e3 * self.decode().seconds

    @property
    def break_even_bandwidth(self) -> float:
        """Bytes/s at which reading the KV of the prompt takes as long as computing it.

        Above it, a hit in a tier is faster than a prefill, and a transfer from a prefill worker can hide behind the
        prefill that makes it.
        """
        load = replace(self.workload, shared=0)
        return self.model.moved_bytes(load.prompt) / replace(self, workload=load, technique=PLAIN).prefill.seconds

    def missed(self) -> list[str]:
        """Objectives that are predicted to be missed: "TTFT", "ITL"; or "both together", if each alone is kept.

        Where sequences decode beside a prefill, a long step keeps them waiting, and short chunks take long.
        """
        limits = (("TTFT", self.ttft_ms, self.workload.ttft_ms), ("ITL", self.itl_ms, self.workload.itl_ms))
        alone = [name for name, value, limit in limits if limit is not None and value > limit]
        most = math.inf if self.workload.ttft_ms is None else self.workload.ttft_ms
        beside = self.ttft_beside_ms
        return alone or (["both together"] if beside > most or beside == math.inf else [])

    @property
    def binds(self) -> dict[str, str]:
        """What binds memory and each objective that is missed."""
        strokes = {"TTFT": self.prefill.bound, "ITL": self.decode().bound, "both together": "interference"}
        return ({} if self.fits else {"memory": "memory"}) | {name: strokes[name] for name in self.missed()}

    @property
    def verdict(self) -> str:
        """ "does not fit", "misses the objective" or "nothing to do"."""
        return "does not fit" if not self.fits else "misses the objective" if self.missed() else "nothing to do"


def make_plan(
    model: ModelSpec,
    machine: MachineSpec,
    weights: WeightFormat,
    tp: int,
    workload: RequestProfile,
    technique: Technique = PLAIN,
) -> Plan:
    """Checks that model and workload go together. Raises InvalidRequest."""
    total = technique.entered(workload.prompt) + workload.output
    if total > model.max_position:
        raise InvalidRequest(
            f"{total - workload.output} prompt and {workload.output} output tokens exceed the {model.max_position} "
            f"positions of {model.name}"
        )
    plan = Plan(model, machine, weights, tp, workload, technique)
    _ = plan.roofline  # raises if the heads cannot be divided
    return plan
