"""The sizes of a decoder, enough to count its parameters, its KV and the work of its steps. No weights are needed.

Layers are described as the engine describes them, also those of models that it cannot run (GPT-3): of these nothing but
the sizes of matrices and entries is meant.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from twostroke.errors import InvalidRequest
from twostroke.models.config import ModelConfig
from twostroke.models.cost import SequenceRows
from twostroke.models.kv_formats import KV_FORMATS, KVFormat
from twostroke.models.recurrent import RecurrentMixer
from twostroke.study.roofline.layer_kind import LayerKind, WeightMatrix

KV_BITS = {16: "bfloat16", 8: "int8", 6: "k8v4"}  # 6: the mean of K and V
MAX_PROMPT = 1 << 40  # tokens of a prompt, where a search for the length at which scores dominate ends


@dataclass(frozen=True)
class ModelSpec:
    """A decoder by its sizes. One that takes hidden states (`config.takes_hidden`) has another model's embedding and
    head, as a head of multi-token prediction."""

    name: str  # what it is called in plans
    config: ModelConfig
    # parameters outside of matrices: norms, biases, sinks, learned positions; None: as the engine's description has
    # them, which for a model that is known by its sizes alone lacks some
    others: int | None = None
    # the format in which it is published, a key of `weights.FORMATS`, or "stored" for an opened file
    weights: str = "bf16"
    source: str = ""  # where its numbers are from
    published: int | None = None  # number of parameters that its publisher states; None if unknown
    # how K and V are stored, one of `models.kv_formats.KV_FORMATS`, or what other engines have
    stored: KVFormat = KV_FORMATS["bfloat16"]
    guesser: "ModelSpec | None" = None  # its head of multi-token prediction: one layer; None if its files have none

    @property
    def guessing(self) -> "ModelSpec":
        """Its head of multi-token prediction. Raises InvalidRequest if there is none."""
        if self.guesser is None:
            raise InvalidRequest(f"{self.name} has no head of multi-token prediction: leave out --draft mtp")
        return replace(self.guesser, name=f"{self.name}'s head", stored=self.stored)

    def with_kv_bits(self, bits: int) -> "ModelSpec":
        """The model with KV in bfloat16, or in this engine's int8 or k8v4, with a scale for each entry and head.

        Raises InvalidRequest for other bits.
        """
        return replace(self, stored=kv_format_of(bits))

    @property
    def kv_bits(self) -> int:
        """Mean bits of a number in the KV cache, without scales."""
        codes = self.stored.codes
        return 8 * self.stored.dtype.itemsize if codes is None else sum(one.bits for one in codes) // 2

    @property
    def hidden(self) -> int:
        return self.config.hidden_size

    @property
    def vocab(self) -> int:
        return self.config.vocab_size

    @property
    def max_position(self) -> int:
        return self.config.max_position

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @cached_property
    def layers(self) -> tuple[LayerKind, ...]:
        """Its layers, those that are equal together."""
        sizes = self.hidden, self.config.token_inputs
        return tuple(LayerKind(count, layer, *sizes) for layer, count in Counter(self.config.layers).items())

    @property
    def head(self) -> WeightMatrix:
        return WeightMatrix("head", "head", self.hidden, self.vocab)

    @cached_property
    def matrices(self) -> list[tuple[int, WeightMatrix]]:
        """Pairs (number of layers, matrix), without the embedding and the head."""
        join = WeightMatrix("join", "projections", 2 * self.hidden, self.hidden)
        found = [(kind.count, matrix) for kind in self.layers for matrix in kind.matrices]
        return [*found, (1, join)] if self.config.takes_hidden else found

    @cached_property
    def layer_parameters(self) -> int:
        return sum(count * matrix.parameters for count, matrix in self.matrices)

    @property
    def vocabulary_parameters(self) -> int:
        """Parameters of the embedding and the head, which are one matrix if tied."""
        return 0 if self.config.takes_hidden else self.vocab * self.hidden * (1 if self.config.tied else 2)

    @cached_property
    def other_parameters(self) -> int:
        """Norms, biases, sinks, learned positions, and the table of per-layer embeddings."""
        if self.others is not None:
            return self.others
        table = self.config.token_inputs * (self.vocab * self.num_layers + 1)  # and a norm
        return self.hidden + table + sum(kind.count * kind.other for kind in self.layers)

    @property
    def parameters(self) -> int:
        return self.layer_parameters + self.vocabulary_parameters + self.other_parameters

    def kv_bytes(self, entries: int, devices: int = 1) -> int:
        """Bytes of K and V of one sequence of `entries` entries; a layer with a window keeps its window alone.

        On so many `devices` together, which copy the heads of layers that have fewer. All counts of KV memory are made
        here, and in `state_bytes`.
        """
        kept = ((kind, min(entries, kind.window or entries)) for kind in self.layers)
        held = ((kind, count * max(1, devices // kind.kv_heads)) for kind, count in kept)
        return sum(kind.count * kind.entry_bytes(self.stored) * count for kind, count in held)

    @cached_property
    def states(self) -> Counter[RecurrentMixer]:
        """The number of recurrent layers with each shape of a state."""
        found = Counter[RecurrentMixer]()
        for kind in self.layers:
            if kind.state is not None:
                found[kind.state] += kind.count
        return found

    @cached_property
    def snapshot_bytes(self) -> int:
        """Bytes of a snapshot of all states, float32; 0 for a model without recurrent layers."""
        return sum(4 * layers * state.snapshot_values for state, layers in self.states.items())

    @cached_property
    def chunk(self) -> int:
        """Positions between two snapshots of states; 1 without any."""
        return next((state.chunk for state in self.states), 1)

    def state_bytes(self, entries: int) -> int:
        """Bytes at most that recurrent layers hold of one running sequence of `entries` entries; none can be evicted.

        The rows of a chunk, and two snapshots: a chunk that has just closed may be opened again.
        """
        return self._state_bytes(entries, min(entries, self.chunk), 2)

    def moved_bytes(self, entries: int) -> int:
        """Bytes of the value of one sequence, which a transfer or a tier moves: the rows since the last snapshot."""
        closed = 1 if entries % self.chunk else 2
        return self.kv_bytes(entries) + self._state_bytes(entries, (entries - 1) % self.chunk + 1, closed)

    def _state_bytes(self, entries: int, rows: int, snapshots: int) -> int:
        """Rows and inputs of the convolution, of 16 bits, and snapshots as far as there are any."""
        numbers = sum(
            layers * (state.row_values * rows + state.conv_size * min(entries, state.conv_width))
            for state, layers in self.states.items()
        )
        return 2 * numbers + self.snapshot_bytes * min(snapshots, entries // self.chunk)

    def typical_length(self, entries: int) -> int:
        """A length about `entries` at which as many rows of a chunk are open as on average."""
        return entries // self.chunk * self.chunk + self.chunk // 2

    def divides(self, devices: int) -> bool:
        """Whether the heads of all layers can be divided among so many devices."""
        return all(kind.heads % devices == 0 for kind in self.layers)

    @cached_property
    def row_flops(self) -> int:
        """FLOPs of all matrices of the layers for one row."""
        return sum(count * matrix.row_flops for count, matrix in self.matrices)

    def attention_flops(self, rows: SequenceRows) -> int:
        """FLOPs of states, and of scores and weighted values: 4 x heads x head_dim for each pair and layer."""
        return sum(kind.count * kind.mixing(rows, self.stored)[0] for kind in self.layers)

    def prefill_flops(self, tokens: int, cached: int = 0) -> dict[str, int]:
        """FLOPs of a prefill by part: projections, scores with states, feed-forward, and the head for one token."""
        parts = {"projections": 0, "scores": self.attention_flops(SequenceRows(tokens, cached)), "feed-forward": 0}
        for count, matrix in self.matrices:
            parts[matrix.part] += count * matrix.row_flops * tokens
        return parts | {"head": self.head.row_flops}

    def crossover(self) -> int | None:
        """The shortest prompt whose scores take more FLOPs than all matrices of the layers; None if none does.

        Without windows, pair_flops n (n + 1) / 2 > row_flops n. Layers with windows grow linearly, and may never.
        """

        def dominate(tokens: int) -> bool:
            return self.attention_flops(SequenceRows(tokens)) > self.row_flops * tokens

        found = 1 + bisect_left(range(1, MAX_PROMPT + 1), True, key=dominate)
        return found if found <= MAX_PROMPT else None


def kv_format_of(bits: int) -> KVFormat:
    """How KV of so many bits is stored. Raises InvalidRequest."""
    if bits not in KV_BITS:
        raise InvalidRequest(f"a number in the KV cache has 16, 8 or 6 bits (K of 8 and V of 4), not {bits}")
    return KV_FORMATS[KV_BITS[bits]]
