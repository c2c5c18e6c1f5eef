"""Attention with latent entries, which are one vector for all heads and stored once (`models.latent`)."""

from collections.abc import Callable, Sequence

import torch

from twostroke.backends.reference.operations import DenseWeight, Operations, TensorBatch, rotate
from twostroke.models.config import Attention, ModelConfig
from twostroke.models.layer_groups import entry_places


class LatentAttentionLayer:
    """A layer's attention, without its output projection."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        attention: Attention,
        operations: Operations,
        pack: Callable[..., DenseWeight],
    ) -> None:
        assert attention.latent is not None, "entries are K and V of heads"
        self.attention, self.latent, self.operations = attention, attention.latent, operations
        self.eps, self.score_cap = config.norm_eps, config.score_cap
        self.place = entry_places(config, operations.stored.name)[index]
        self.down = pack(*attention.projections)
        self.q_up = None
        if self.latent.query_rank is not None:
            self.q_up = pack("q_down_norm"), pack("q_up")
        self.kv_norm = pack("kv_norm")
        heads = range(attention.num_heads)
        self.k_up, self.v_up = (torch.stack([pack(f"heads.{h}.{up}").matrix for h in heads]) for up in ("k_up", "v_up"))

    def __call__(
        self, h: torch.Tensor, kv: Sequence[torch.Tensor], batch: TensorBatch, queries: list[torch.Tensor]
    ) -> torch.Tensor:
        """[N, hidden] -> [N, heads * value]. Queries are appended."""
        ops, attention, latent, (group, place) = self.operations, self.attention, self.latent, self.place
        made, down = ops.linear(h, self.down).split([len(self.down.matrix) - latent.entry, latent.entry], -1)
        if self.q_up is not None:
            norm, up = self.q_up
            made = ops.linear(ops.norm(made, norm, self.eps), up)
        plain, turned = made.view(len(h), -1, latent.query).split([latent.plain, latent.rotated], -1)
        met = torch.einsum("nhp,hrp->nhr", plain, self.k_up)
        latents, shared = down[:, None].split([latent.rank, latent.rotated], -1)
        angles = ops.angles(batch, attention.rope, attention.head_dim)
        entries = rotate(_laid_out(ops.norm(latents, self.kv_norm, self.eps), shared), *angles)
        q, own = rotate(_laid_out(met, turned), *angles), kv[group][place]
        own[0][batch.pages[group], :, batch.slots] = entries.to(own.dtype)
        if batch.query_rows is not None:
            queries.append(q[batch.query_rows].float() * attention.scale)
        seen = ops.attention(q, own, batch, group, attention, self.score_cap, None, group + place).view(q.shape)
        half = latent.rotated // 2
        first, second = seen.chunk(2, -1)
        return torch.einsum("nhr,hvr->nhv", torch.cat([first[..., half:], second[..., half:]], -1), self.v_up).flatten(
            1
        )


def _laid_out(latents: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
    """Entries, or queries: halves of both parts in turn."""
    halves = zip(turned.chunk(2, -1), latents.chunk(2, -1), strict=True)
    return torch.cat([part for half in halves for part in half], -1)
