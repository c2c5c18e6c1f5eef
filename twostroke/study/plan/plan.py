"""The plan of a deployment: memory, both strokes, and what binds."""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace

from twostroke.errors import InvalidRequest
from twostroke.models.cost import SequenceRows
from twostroke.study.plan.machines import MachineSpec
from twostroke.study.plan.roofline import Roofline, StepTime
from twostroke.study.plan.specification import ModelSpec
from twostroke.study.plan.techniques import PLAIN, Technique
from twostroke.study.plan.weights import WeightFormat

RESERVED_SHARE = (
    0.10  # of the memory, for activations and the runtime: an assumption, as in vLLM's gpu_memory_utilization
)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MAX_BATCH = 1 << 16
CHUNKS = (128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class RequestProfile:
    """What users ask, and what they are promised. Checked on construction.

    Attributes:
        shared: first tokens of each prompt that are known already, in the prefix index.
        concurrency: sequences that decode at once.
        ttft_ms, itl_ms: objectives; None for none.
    """

    prompt: int
    output: int
    concurrency: int = 1
    shared: int = 0
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
            if limit is not None and not limit > 0:
                raise InvalidRequest(f"an objective of {limit:g} ms for {name} cannot be met: give more than 0")


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes of all devices together.

    Attributes:
        weights: of the model, and of the companion that the technique needs.
        kv_per_user: of a sequence at its end.
        passing: KV that a prefill holds and decode does not, as PTDO's first copy; once, since prefills take turns.
        room: for KV, beside the weights and what is reserved; negative if the weights do not fit.
    """

    weights: int
    kv_per_user: int
    passing: int
    room: int

    @property
    def users(self) -> int:
        return max(0, self.room - self.passing) // self.kv_per_user


@dataclass(frozen=True)
class Plan:
    """One configuration and what is predicted of it.

    Attributes:
        tp: devices that share each product.
        disaggregated: prefill runs on workers of its own, each like this one, which send prompts' KV over the link.
    """

    model: ModelSpec
    machine: MachineSpec
    weights: WeightFormat
    tp: int
    workload: RequestProfile
    technique: Technique = PLAIN
    disaggregated: bool = False

    @property
    def roofline(self) -> Roofline:
        return Roofline(self.model, self.machine, self.weights, self.tp)

    @property
    def capacity(self) -> int:
        """Bytes of all devices without what is reserved."""
        return int(self.tp * self.machine.memory * (1 - RESERVED_SHARE))

    @property
    def memory(self) -> PlannedMemory:
        """Memory for sequences of full length. KV heads are copied if there are fewer than devices."""
        copies = max(1, self.tp // min(kind.kv_heads for kind in self.model.layers))
        load, used = self.workload, self.technique
        weights, held = self.weights.total(self.model), used.held(load.prompt, load.output)
        kv = self.model.kv_bytes(held) * copies
        if (companion := used.companion) is not None:
            weights += companion.weights.total(companion.model)
            kv += companion.model.kv_bytes(held) * copies if used.own_kv else 0
        passing = max(0, self.model.kv_bytes(max(used.entered(load.prompt), 1)) * copies - kv)
        return PlannedMemory(weights, kv, passing, self.capacity - weights)

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
        """Mean entries before a decoded token."""
        return self.technique.context(self.workload.prompt, self.workload.output)

    @property
    def _others(self) -> list[SequenceRows]:
        """A token for each sequence beside one that is prefilled."""
        return [SequenceRows(1, self.context, 1)] * (self.workload.concurrency - 1)

    def mixed(self, chunk: int) -> StepTime:
        """The longest step of chunked prefill: the last chunk of a prompt, and a token for each other sequence."""
        entered = self.technique.entered(self.workload.prompt)
        chunk = min(chunk, entered)
        return self.roofline.step([SequenceRows(chunk, entered - chunk, 1), *self._others])

    def chunked_ttft(self, chunk: int) -> float:
        """Seconds until the first token if each step has one chunk of the prompt beside the other sequences."""
        entered = self.technique.entered(self.workload.prompt)
        left, known, total = entered - self.workload.shared, self.workload.shared, 0.0
        while left > 0:
            now = min(chunk, left)
            total += self.roofline.step([SequenceRows(now, known, int(now == left)), *self._others]).seconds
            left, known = left - now, known + now
        return total

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
    def transfer_s(self) -> float | None:
        """Seconds in which the KV of a prompt crosses the link, all after the prefill; None if the link is unknown."""
        link = self.machine.link if self.machine.link is not None else self.machine.host
        size = self.model.kv_bytes(self.technique.kept(self.workload.prompt))
        return None if link is None else size / (link * self.machine.link_share)

    @property
    def ttft_ms(self) -> float:
        """Milliseconds of a prefill without queueing, and of what follows it before the first token."""
        return 1e3 * (self.prefill.seconds + ((self.transfer_s or 0.0) if self.disaggregated else 0.0))

    @property
    def ttft_beside_ms(self) -> float:
        """TTFT in chunks that keep the objective for ITL beside the other sequences; infinite if none does."""
        if self.disaggregated or self.workload.concurrency == 1 or self.workload.itl_ms is None:
            return self.ttft_ms
        chunk = self.largest_chunk()
        return math.inf if chunk is None else 1e3 * self.chunked_ttft(chunk)

    @property
    def itl_ms(self) -> float:
        return 1e3 * self.decode().seconds

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens a second of all sequences, where only decode runs."""
        return self.workload.concurrency / self.decode().seconds

    @property
    def break_even_bandwidth(self) -> float:
        """Bytes/s at which reading the KV of the prompt takes as long as computing it.

        Above it, a hit in a tier is faster than a prefill, and a transfer from a prefill worker can hide behind the
        prefill that makes it.
        """
        load = replace(self.workload, shared=0)
        return self.model.kv_bytes(load.prompt) / replace(self, workload=load, technique=PLAIN).prefill.seconds

    def compute_bound_batch(self) -> int | None:
        """The smallest batch whose matrices take longer to multiply than to read; None if none up to 65,536 does."""

        def bound(batch: int) -> bool:
            # For matrices, a token of each sequence is as much work as as many tokens of one.
            parts = [
                part for part in self.roofline.step([SequenceRows(batch, 0, batch)]).parts if part.name != "scores"
            ]
            return sum(part.compute_s for part in parts) >= sum(part.memory_s for part in parts)

        found = 1 + bisect_left(range(1, MAX_BATCH + 1), True, key=bound)
        return found if found <= MAX_BATCH else None

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
