"""How long a step takes on a machine that is described by its peaks (Williams et al. 2009: the roofline model).

A step is a sequence of products: those of the layers' matrices, attention, and the head. Each takes as long as its
FLOPs or its bytes, whichever is longer, and they follow each other. So a step is never predicted below its floor.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from twostroke.errors import InvalidRequest
from twostroke.models.cost import SequenceRows, attended
from twostroke.models.kv_formats import KV_FORMATS
from twostroke.study.roofline.layer_kind import WeightMatrix
from twostroke.study.roofline.machines import MachineSpec
from twostroke.study.roofline.model_spec import ModelSpec
from twostroke.study.roofline.weight_formats import WeightFormat


@dataclass(frozen=True)
class RooflinePart:
    """One part of a step on one device: FLOPs, bytes of weights and KV read, and seconds of each."""

    name: str
    flops: float
    bytes: float
    compute_s: float
    memory_s: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s)

    def __mul__(self, times: float) -> "RooflinePart":
        counts = (self.flops, self.bytes, self.compute_s, self.memory_s)
        return RooflinePart(self.name, *(times * count for count in counts))


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step, or of several that follow each other, by part."""

    parts: tuple[RooflinePart, ...]
    link_s: float

    def __add__(self, other: "StepTime") -> "StepTime":
        """The time of both, one after the other."""
        return StepTime((*self.parts, *other.parts), self.link_s + other.link_s)

    def __mul__(self, times: float) -> "StepTime":
        """The time of so many such steps, or of a fraction of one."""
        return StepTime(tuple(part * times for part in self.parts), self.link_s * times)

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts) + self.link_s

    @property
    def flops(self) -> float:
        return sum(part.flops for part in self.parts)

    @property
    def bytes(self) -> float:
        return sum(part.bytes for part in self.parts)

    def utilization(self, machine: MachineSpec) -> tuple[float, float]:
        """The parts of the peak rate and of the bandwidth of a device that are used."""
        compute, memory = (sum(times) for times in zip(*((p.compute_s, p.memory_s) for p in self.parts), strict=True))
        return machine.compute * compute / self.seconds, machine.memory_share * memory / self.seconds

    @property
    def bound(self) -> str:
        """The resource that takes the largest part of the time: "compute", "bandwidth" or "link"."""
        spent = {"compute": 0.0, "bandwidth": 0.0, "link": self.link_s}
        for part in self.parts:
            spent["compute" if part.compute_s >= part.memory_s else "bandwidth"] += part.seconds
        return max(spent, key=lambda name: spent[name])


class Roofline:
    """Predicts steps of one model on `tp` devices (tensor parallelism, Shoeybi et al. 2019, arXiv:1909.08053)."""

    def __init__(self, model: ModelSpec, machine: MachineSpec, weights: WeightFormat, tp: int = 1) -> None:
        """Raises InvalidRequest if the heads cannot be divided, or if the machine's link is unknown."""
        if not model.divides(tp):
            raise InvalidRequest(f"the heads of {model.name} cannot be divided among {tp} devices")
        if tp > 1 and (missing := machine.unknown_link):
            raise InvalidRequest(
                f"machine {machine.name} has no {missing}: tensor parallelism cannot be planned. Measure it, and plan "
                f"with a file that has it"
            )
        self.model, self.machine, self.weights, self.tp = model, machine, weights, tp
        self.dtype = machine.dtype(weights.arithmetic)
        # On CPUs steps gain little with KV of 8 bits, and long prefills lose: no gain is planned (docs/kv-bits.md).
        self.kv_read = KV_FORMATS["bfloat16"] if machine.kind == "cpu" else model.stored
        self._known: dict[tuple[int, int], StepTime] = {}
        # Of layers with one window together: FLOPs of a pair, and bytes of an entry. Other layers count by themselves.
        sums: defaultdict[int | None, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        self._other = [kind for kind in model.layers if kind.state is not None or kind.latent is not None]
        for kind in (kind for kind in model.layers if kind not in self._other):
            flops, read = sums[kind.window]
            entry = kind.count * kind.entry_bytes(self.kv_read) / min(tp, kind.kv_heads)
            sums[kind.window] = flops + kind.count * kind.pair_flops / tp, read + entry
        self._windows = [(window, *both) for window, both in sums.items()]

    def step(self, rows: Sequence[SequenceRows] | Mapping[SequenceRows, int]) -> StepTime:
        """The step of the rows of several sequences; a mapping says how many sequences have the same."""
        rows = rows if isinstance(rows, Mapping) else Counter(rows)
        count, logits = (sum(getattr(one, name) * times for one, times in rows.items()) for name in ("count", "logits"))
        products = self.products(count, logits)
        return StepTime((*products.parts, self.attention(rows.items())), products.link_s)

    def products(self, count: int, logits: int) -> StepTime:
        """All of a step of so many rows but attention: steps of as many rows have the same."""
        if (count, logits) not in self._known:
            matrices = [(layers, one, count) for layers, one in self.model.matrices]
            matrices += [(1, self.model.head, logits)] if logits else []
            names = dict.fromkeys(one.part for _, one, _ in matrices)
            parts = [self._products(name, [one for one in matrices if one[1].part == name]) for name in names]
            self._known[count, logits] = StepTime(tuple(parts), self._link(count))
        return self._known[count, logits]

    def _products(self, name: str, matrices: Sequence[tuple[int, WeightMatrix, int]]) -> RooflinePart:
        flops = sum(layers * one.row_flops * rows for layers, one, rows in matrices) / self.tp
        read = sum(
            layers * one.read(rows) * one.inputs * one.outputs * self.weights.matrix(one)
            for layers, one, rows in matrices
        )
        return self._part(name, flops, read / self.tp, self.dtype)

    def attention(self, rows: Iterable[tuple[SequenceRows, int]]) -> RooflinePart:
        """Scores and weighted values, and states, at the rate of attention or else of bf16. `rows`: of how many
        sequences each.

        KV heads are copied to all devices if there are fewer than devices.
        """
        flops = read = 0.0
        pairs = list(rows)
        for window, pair_flops, entry_bytes in self._windows:
            seen = held = 0
            for one, times in pairs:
                more, entries = attended(one, window)
                seen += times * more
                held += times * entries
            flops += pair_flops * seen
            read += entry_bytes * held
        for kind in self._other:
            for one, times in pairs:
                work, size = kind.mixing(one, self.kv_read)
                flops += times * kind.count * work / self.tp
                read += times * kind.count * size / min(self.tp, kind.kv_heads)
        return self._part("scores", flops, read, self.machine.dtype(("attention",)))

    def _part(self, name: str, flops: float, read: float, dtype: str) -> RooflinePart:
        machine = self.machine
        compute = flops / (machine.flops[dtype] * machine.compute)
        return RooflinePart(name, flops, read, compute, read / (machine.bandwidth * machine.memory_share))

    @property
    def kv_copies(self) -> float:
        """How often a KV entry is held, on average over layers: KV heads are copied if there are fewer than devices."""
        return self.model.kv_bytes(1, self.tp) / self.model.kv_bytes(1)

    def held_bytes(self, entries: int) -> int:
        """Bytes of all devices together that a running sequence of `entries` entries holds. States are divided."""
        return self.model.kv_bytes(entries, self.tp) + self.model.state_bytes(entries)

    def all_reduce_bytes(self, rows: int) -> float:
        """Bytes that each device sends in one ring all-reduce of [rows, hidden] bf16: 2 (n - 1) / n of them."""
        return 2 * (self.tp - 1) / self.tp * rows * self.model.hidden * 2

    def gather_bytes(self, rows: int) -> float:
        """Bytes that each device receives in a step if outputs are shared out instead, as this engine does.

        What heads attend to, the inputs of the MLP, gated values, and the inputs of the next layer: (n - 1) / n of
        [rows, heads x head_dim + 2 hidden + intermediate] bf16 a layer (docs/tensor-parallelism.md).
        """
        gathered = sum(kind.count * kind.gathered for kind in self.model.layers)
        return (self.tp - 1) / self.tp * rows * gathered * 2

    @property
    def all_reduces(self) -> int:
        """All-reduces of a step: two a layer, after attention and after the feed-forward."""
        return 2 * self.model.num_layers if self.tp > 1 else 0

    def _link(self, rows: int) -> float:
        """Seconds of all all-reduces: each takes its bytes over the link, and the latency of a small one."""
        link, latency = self.machine.link, self.machine.link_latency
        if self.tp == 1 or link is None or latency is None:
            return 0.0
        return self.all_reduces * (latency + self.all_reduce_bytes(rows) / (link * self.machine.link_share))
