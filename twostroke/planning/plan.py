"""The plan of a deployment: memory, both strokes, what binds, and what to change."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from twostroke.errors import InvalidRequest
from twostroke.models.cost import Rows
from twostroke.planning.machines import Machine
from twostroke.planning.roofline import Roofline, StepTime
from twostroke.planning.specification import Specification
from twostroke.planning.weights import FORMATS, WeightFormat

RESERVED = 0.10  # of the memory, for activations and the runtime: an assumption, as in vLLM's gpu_memory_utilization
DEGREES = (1, 2, 4, 8)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
LARGEST_BATCH = 1 << 16
CHUNKS = (128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Workload:
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

    @property
    def context(self) -> int:
        """Mean entries before a decoded token: the prompt and half of the answer."""
        return self.prompt + self.output // 2


@dataclass(frozen=True)
class Memory:
    """Bytes of all devices together."""

    weights: int
    kv_per_user: int
    room: int  # for KV, beside the weights and what is reserved; negative if the weights do not fit

    @property
    def users(self) -> int:
        return max(0, self.room) // self.kv_per_user


@dataclass(frozen=True)
class Plan:
    """One configuration and what is predicted of it."""

    model: Specification
    machine: Machine
    weights: WeightFormat
    tp: int
    workload: Workload

    @property
    def roofline(self) -> Roofline:
        return Roofline(self.model, self.machine, self.weights, self.tp)

    @property
    def memory(self) -> Memory:
        """Memory for sequences of full length. KV heads are copied if there are fewer than devices."""
        copies = max(1, self.tp // min(kind.kv_heads for kind in self.model.layers))
        weights = self.weights.total(self.model)
        kv = self.model.kv_bytes(self.workload.prompt + self.workload.output) * copies
        return Memory(weights, kv, int(self.tp * self.machine.memory * (1 - RESERVED)) - weights)

    @property
    def fits(self) -> bool:
        return self.memory.users >= self.workload.concurrency

    @property
    def prefill(self) -> StepTime:
        """The prefill of a prompt alone, in one step; its shared tokens are known."""
        new = self.workload.prompt - self.workload.shared
        return self.roofline.step([Rows(new, self.workload.shared, 1)])

    def decode(self, batch: int | None = None) -> StepTime:
        """A step in which `batch` sequences make a token; None for the workload's concurrency."""
        return self.roofline.step([Rows(1, self.workload.context, 1)] * (batch or self.workload.concurrency))

    @property
    def _others(self) -> list[Rows]:
        """A token for each sequence beside one that is prefilled."""
        return [Rows(1, self.workload.context, 1)] * (self.workload.concurrency - 1)

    def mixed(self, chunk: int) -> StepTime:
        """The longest step of chunked prefill: the last chunk of a prompt, and a token for each other sequence."""
        chunk = min(chunk, self.workload.prompt)
        return self.roofline.step([Rows(chunk, self.workload.prompt - chunk, 1), *self._others])

    def chunked_ttft(self, chunk: int) -> float:
        """Seconds until the first token if each step has one chunk of the prompt beside the other sequences."""
        left, known, total = self.workload.prompt - self.workload.shared, self.workload.shared, 0.0
        while left:
            now = min(chunk, left)
            total += self.roofline.step([Rows(now, known, int(now == left)), *self._others]).seconds
            left, known = left - now, known + now
        return total

    @property
    def ttft_ms(self) -> float:
        """Milliseconds of a prefill without queueing."""
        return 1e3 * self.prefill.seconds

    @property
    def itl_ms(self) -> float:
        return 1e3 * self.decode().seconds

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences, where nothing but decode runs."""
        return self.workload.concurrency / self.decode().seconds

    @property
    def break_even_bandwidth(self) -> float:
        """Bytes/s at which reading the KV of the prompt takes as long as computing it.

        Above it, a hit in a tier is quicker than a prefill, and a transfer from a prefill worker can hide behind the
        prefill that makes it.
        """
        load = replace(self.workload, shared=0)
        return self.model.kv_bytes(load.prompt) / replace(self, workload=load).prefill.seconds

    def compute_bound_batch(self) -> int | None:
        """The smallest batch whose matrices take longer to multiply than to read; None if none up to 65,536 does."""

        def bound(batch: int) -> bool:
            # For matrices, a token of each sequence is as much work as as many tokens of one.
            parts = [part for part in self.roofline.step([Rows(batch, 0, batch)]).parts if part.name != "scores"]
            return sum(part.compute_s for part in parts) >= sum(part.memory_s for part in parts)

        found = 1 + bisect_left(range(1, LARGEST_BATCH + 1), True, key=bound)
        return found if found <= LARGEST_BATCH else None

    def missed(self) -> list[str]:
        """Objectives that are predicted to be missed: "TTFT", "ITL"."""
        limits = (("TTFT", self.ttft_ms, self.workload.ttft_ms), ("ITL", self.itl_ms, self.workload.itl_ms))
        return [name for name, value, limit in limits if limit is not None and value > limit]

    @property
    def verdict(self) -> str:
        """ "does not fit", "misses the objective" or "nothing to do"."""
        return "does not fit" if not self.fits else "misses the objective" if self.missed() else "nothing to do"


@dataclass(frozen=True)
class Lever:
    """A change, and the plan that it makes."""

    name: str
    plan: Plan


def make_plan(model: Specification, machine: Machine, weights: WeightFormat, tp: int, workload: Workload) -> Plan:
    """Checks that model and workload go together. Raises InvalidRequest."""
    total = workload.prompt + workload.output
    if total > model.max_position:
        raise InvalidRequest(
            f"{workload.prompt} prompt and {workload.output} output tokens exceed the {model.max_position} positions "
            f"of {model.name}"
        )
    plan = Plan(model, machine, weights, tp, workload)
    _ = plan.roofline  # raises if the heads cannot be divided
    return plan


def levers(plan: Plan) -> list[Lever]:
    """Changes in the order of source 002's decision framework; only those that apply.

    Tiled attention is taken for granted. Then come prefix caching, tensor parallelism, and shorter prompts; for decode
    and memory, quantized weights and fewer sequences at once.
    """
    found: list[Lever] = []
    load = plan.workload
    if load.shared == 0 and load.prompt > 1:
        half = replace(load, shared=load.prompt // 2)
        found.append(Lever("prefix caching, if half of the prompt is shared", replace(plan, workload=half)))
    for tp in (degree for degree in DEGREES if degree > plan.tp):
        if plan.machine.link is not None and all(kind.heads % tp == 0 for kind in plan.model.layers):
            found.append(Lever(f"tensor parallelism of {tp}", replace(plan, tp=tp)))
    smaller = [one for one in FORMATS.values() if one.total(plan.model) < 0.95 * plan.weights.total(plan.model)]
    for weights in smaller:
        if weights.name != "mxfp4" or plan.model.weights == "mxfp4":
            found.append(Lever(f"weights in {weights.name}", replace(plan, weights=weights)))
    if load.concurrency > 1:
        fewer = max(1, min(load.concurrency // 2, plan.memory.users or load.concurrency // 2))
        found.append(Lever(f"{fewer} sequences at once", replace(plan, workload=replace(load, concurrency=fewer))))
    if load.prompt > 1:
        shorter = replace(load, prompt=ceil(load.prompt / 2), shared=min(load.shared, ceil(load.prompt / 2) - 1))
        found.append(Lever("prompts of half the length", replace(plan, workload=shorter)))
    return found


def solving(plan: Plan, options: Sequence[Lever]) -> Lever | None:
    """The first lever with which everything fits and no objective is missed."""
    return next((lever for lever in options if lever.plan.verdict == "nothing to do"), None)
