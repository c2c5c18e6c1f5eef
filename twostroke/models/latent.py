"""Multi-head latent attention (MLA; DeepSeek-AI 2024, arXiv:2405.04434): an entry is one vector for all heads."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Latent:
    """What attention with latent entries has in place of K and V of each head.

    An entry is a latent vector after its norm, and a rotated part that all heads share. Queries are multiplied by each
    head's `k_up`, so that they meet latents, and what a head attends to by its `v_up` (absorbed attention). So V is K,
    of which `v_up` reads the latent part.

    An entry is laid out as every head here is, pair i of RoPE being (i, i + size / 2): the first half of the rotated
    part, the first half of the latent, and then the two second halves.
    """

    rank: int  # numbers of a latent
    rotated: int  # numbers of the rotated part, in an entry and in each head of a query
    plain: int  # numbers of a head of a query that are not rotated, which `k_up` takes
    value: int  # numbers of a head that `v_up` makes
    # numbers of the vector, with a norm, that queries are made of; None: of the layer's input
    query_rank: int | None = None

    @property
    def entry(self) -> int:
        """Numbers of an entry."""
        return self.rank + self.rotated

    @property
    def query(self) -> int:
        """Numbers of a head of a query before `k_up`."""
        return self.plain + self.rotated

    def shapes(self, heads: int, hidden: int) -> dict[str, tuple[int, ...]]:
        """The tensors of a layer, without the output projection, by name."""
        made, rank = (heads * self.query, hidden), self.query_rank
        shapes: dict[str, tuple[int, ...]] = {"q": made}
        if rank is not None:
            shapes = {"q_down": (rank, hidden), "q_down_norm": (rank,), "q_up": (heads * self.query, rank)}
        shapes |= {"kv_down": (self.entry, hidden), "kv_norm": (self.rank,)}
        for head in range(heads):
            shapes[f"heads.{head}.k_up"] = (self.rank, self.plain)
            shapes[f"heads.{head}.v_up"] = (self.value, self.rank)
        return shapes
