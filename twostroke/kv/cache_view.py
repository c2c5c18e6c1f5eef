"""What a KV value says of itself: its tokens, positions, bytes, entries and states, for inspection and tests."""

import numpy as np

from twostroke.errors import KVError
from twostroke.kv import spans, states
from twostroke.kv.entries import EntryTable, Tail
from twostroke.kv.page_contents import read_entries, read_keys
from twostroke.kv.pages import POOL
from twostroke.kv.pool import PagePool
from twostroke.kv.provenance import Stretch


class CacheView:
    """Entries in pages of a pool, which it holds as long as it lives.

    Attributes:
        pool: the pool whose pages hold the entries.
        tier: the tier in which the value keeps its pages: "pool", "host", "disk" or "remote".
        entry_table: where the entries lie, their tokens, their provenance, and what comes next.
    """

    __slots__ = ("entry_table", "pool", "tier")

    def __init__(self, pool: PagePool, entry_table: EntryTable, tier: str = POOL) -> None:
        """Take one reference to every page of the entries. Use `LLM.prefill` or `empty` instead."""
        self.pool, self.tier = pool, tier
        pool.retain(entry_table.pages, tier)
        self.entry_table = entry_table

    def __del__(self) -> None:
        if hasattr(self, "entry_table"):  # not set if __init__ failed before it took its references
            self.pool.drop(self.entry_table.pages, self.tier)

    def __len__(self) -> int:
        return len(self.entry_table)

    @property
    def tokens(self) -> list[int]:
        """The token of each entry."""
        return self.entry_table.tokens.tolist()

    @property
    def positions(self) -> list[int]:
        """The position of each entry, strictly increasing unless `resumed_at` set a position."""
        return spans.positions(self.table).tolist()

    @property
    def head_positions(self) -> np.ndarray | None:
        """The position of each head's entries, [layers with K and V of their own, KV heads, n] int32; None if all heads
        hold the same (see `gather`)."""
        heads = self.entry_table.head_positions
        return None if heads is None else heads.transpose(1, 2, 0).copy()

    @property
    def bias(self) -> np.ndarray | None:
        """What is added to the score of each head's entries (`with_bias`), [layers with K and V of their own, KV heads,
        n] float32; None for 0."""
        bias = self.entry_table.bias
        return None if bias is None else bias.transpose(1, 2, 0).copy()

    @property
    def next_position(self) -> int:
        """The position of the next entry."""
        return self.entry_table.next_position

    @property
    def tail(self) -> Tail | None:
        """Logits or pending token from which the next stroke starts."""
        return self.entry_table.tail

    @property
    def pending(self) -> int | None:
        """The last sampled token if it is not entered yet; the next stroke enters it first."""
        return self.tail.pending if self.tail else None

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """Provenance of the entries."""
        return self.entry_table.stretches

    @property
    def nbytes(self) -> int:
        """Exact bytes of K and V of the entries, without those that windowed layers have given back, and of states.

        An entry in a layer has 2 x KV heads x (head_dim x element size + bytes of a scale) bytes.
        """
        geometry, snapshots = self.pool.geometry, self.entry_table.snapshots
        return geometry.table_bytes(self.table) + geometry.state_bytes * sum(len(one.pages) > 0 for one in snapshots)

    @property
    def num_pages(self) -> int:
        """Number of pages held, including shared ones."""
        return len(np.unique(self.entry_table.pages))

    @property
    def fingerprint(self) -> str:
        """Digest of layers, KV heads, head_dim, RoPE, KV dtype and tokenizer; values are joined only if it agrees."""
        return self.pool.geometry.fingerprint

    @property
    def table(self) -> np.ndarray:
        """[P, 3 + groups] int32 spans: START, STOP, POSITION, and page ids (see `kv.spans`). Read-only."""
        return self.entry_table.table

    @property
    def token_array(self) -> np.ndarray:
        """The tokens, [n] int32. Read-only."""
        return self.entry_table.tokens

    def canonical_length(self, model: str) -> int:
        """Number of leading entries that `model` (an id) computed over exactly the tokens before each."""
        return self.entry_table.canonical_length(model)

    @property
    def complete(self) -> bool:
        """Whether a stroke can go on from here: windowed layers have all entries that the next one attends to.

        They give back entries behind their window, and recurrent layers the states before the last. So a value that is
        cut back may lack some. A stroke that goes on from it computes them again from the tokens, if all entries are
        canonical.
        """
        return self.pool.geometry.complete(self.entry_table)

    def entries(self, layer: int | None = None) -> np.ndarray:
        """A copy of K and V: [layers, 2, len, Hkv, D], or [2, len, Hkv, D] of one layer, for inspection and tests.

        A numpy array in the pool's dtype, or float32 if that has codes and scales. bfloat16 is `ml_dtypes.bfloat16`;
        use `.astype(np.float32)` to compute.
        K and V are the same for latent entries (`models.latent`), which are stored once.
        NaN stands for entries that windowed layers have given back, and for those that no head sees. A layer that
        reads another's entries has none.

        Raises:
            PageLost: its pages are gone or damaged where they were.
            KVError: the layers differ in shape, and none was named, or this one has no entries of its own.
        """

        def decode(stored: np.ndarray) -> np.ndarray:
            numbers = self.pool.geometry.stored.decode(stored)
            return numbers if numbers.shape[-4] == 2 else np.repeat(numbers, 2, -4)  # K that is V

        if layer is not None:
            group, place = self._place_of(layer)
            return decode(read_entries(self.pool, group, *spans.places(self.table, group))[place])
        groups = self.pool.geometry.kv_groups
        if len({(group.num_kv_heads, group.head_dim) for _, group in groups}) > 1:
            raise KVError("the layers of this value differ in shape: name one, as in kv.entries(layer)")
        layers = [layer for _, group in groups for layer in group.layers]
        parts = [decode(read_entries(self.pool, g, *spans.places(self.table, g))) for g, _ in groups]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)[np.argsort(layers)]

    def keys(self, layer: int) -> np.ndarray:
        """A copy of one layer's K after RoPE: [len, Hkv, D], in the pool's dtype and with NaN like `entries`.

        Raises PageLost, and KVError if the layer has no entries of its own.
        """
        group, place = self._place_of(layer)
        stored = read_keys(self.pool, group, place, *spans.places(self.table, group))
        return self.pool.geometry.stored.decode_keys(stored)

    def states(self) -> dict[int, np.ndarray] | None:
        """A copy of the state behind the last entry in each recurrent layer, by index, for inspection and tests.

        float32 [heads of v, k_dim, v_dim] (`models.recurrent`), or where there is no such matrix the last inputs of
        the convolution, [inputs, channels]; None if it is not known, as behind a cut. Raises PageLost.
        """
        found = states.states_behind(self.pool, self.entry_table)
        return (
            None
            if found is None
            else {layer: one.state if one.state.size else one.inputs for layer, one in found.items()}
        )

    def _place_of(self, layer: int) -> tuple[int, int]:
        """The group of a layer, and its place in the group's pages."""
        groups = self.pool.geometry.kv_groups
        for group, one in groups:
            if layer in one.layers:
                return group, one.layers.index(layer)
        own = sorted(index for _, one in groups for index in one.layers)
        raise KVError(f"layer {layer} has no entries of its own: those that have are {own}")

    def __repr__(self) -> str:
        positions = self.positions
        where = f"positions {positions[0]} to {positions[-1]}, " if positions else ""
        tier = "" if self.tier == POOL else f", tier {self.tier}"
        return f"KVCache({len(self)} entries, {where}{self.nbytes:,} bytes in {self.num_pages} pages{tier})"
