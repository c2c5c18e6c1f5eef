"""The decoder-only transformer, every family in one description of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from twostroke.backends.interface import Kernels, Operations, RaggedBatch
from twostroke.formats.tensor import RawTensor
from twostroke.models.config import ModelConfig
from twostroke.sampling.noise import Noise

if TYPE_CHECKING:
    import torch


class Layer:
    """One block: attention and gated MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, index: int, kernels: Kernels, tensor: Callable[[str], RawTensor]) -> None:
        def pack(*names: str, bias: tuple[str, ...] = ()) -> Any:
            prefix = f"layers.{index}."
            return kernels.pack([tensor(prefix + n) for n in names], [tensor(prefix + n) for n in bias])

        self.config, self.kernels, self.index = config, cast(Operations, kernels), index
        self.rope, self.window = config.ropes[index], config.windows[index]
        self.attn_norm, self.mlp_norm = pack("attn_norm"), pack("mlp_norm")
        self.qkv = pack("q", "k", "v", bias=("q_bias", "k_bias", "v_bias") if config.attention_bias else ())
        self.o, self.gate_up, self.down = pack("o"), pack("gate", "up"), pack("down")
        self.qk_norms = (pack("q_norm"), pack("k_norm"), config.norm_eps) if config.qk_norm else None
        self.post_norms = (pack("attn_post_norm"), pack("mlp_post_norm")) if config.post_norms else None

    def __call__(
        self, x: torch.Tensor, kv: torch.Tensor, batch: RaggedBatch[torch.Tensor], queries: np.ndarray | None
    ) -> torch.Tensor:
        k, config = self.kernels, self.config
        h = k.norm(x, self.attn_norm, config.norm_eps)
        q = k.rope_store(k.linear(h, self.qkv), kv, batch, self.rope, self.qk_norms)
        if queries is not None:
            queries[:] = k.leave(q[batch.query_rows].float() * config.attention_scale)
        attended = k.attention(q, kv, batch, config.attention_scale, self.window)
        if self.post_norms is None:
            x = k.linear(attended, self.o, residual=x)
        else:
            x = x + k.norm(k.linear(attended, self.o), self.post_norms[0], config.norm_eps)
        h = k.norm(x, self.mlp_norm, config.norm_eps)
        if batch.dropout is not None:
            h = h * batch.dropout[self.index].to(h.dtype)
        h = k.gated_linear(h, self.gate_up, config.activation)
        if self.post_norms is None:
            return k.linear(h, self.down, residual=x)
        return x + k.norm(k.linear(h, self.down), self.post_norms[1], config.norm_eps)


class Decoder:
    """A model's weights and its forward pass over a ragged batch."""

    def __init__(self, config: ModelConfig, kernels: Kernels, tensor: Callable[[str], RawTensor]) -> None:
        """`tensor` gives a checkpoint's tensor by its Twostroke name (`models.config.tensor_shapes`)."""
        self.config, self.kernels = config, kernels
        self.embed = kernels.pack([tensor("embed")]) if config.tied else kernels.table(tensor("embed"))
        self.layers = [Layer(config, i, kernels, tensor) for i in range(config.num_layers)]
        self.norm = kernels.pack([tensor("norm")])
        self.head = self.embed if config.tied else kernels.pack([tensor("head")])
        self._pass = kernels.whole_pass(self)

    def forward(self, batch: RaggedBatch[np.ndarray], kv: Any) -> Any:
        """Run the rows through every layer, writing their K and V.

        Args:
            batch: N rows; its `queries` are filled if it asks for any.
            kv: the pool's storage, [layers, 2, pages, Hkv, page_size, D].

        Returns:
            [W, hidden], of the rows that are wanted, before the last norm; only the backend reads it.
        """
        config = self.config
        if batch.query_rows is not None:
            shape = (config.num_layers, len(batch.query_rows), config.num_heads, config.head_dim)
            batch.queries = np.empty(shape, np.float32)
        if self._pass is not None:
            return self._pass.forward(batch, kv)
        operations = cast(Operations, self.kernels)
        with operations.running():
            there, kv = operations.enter(batch, kv)
            x = operations.embed(self.embed, there.token_ids, config.embedding_scale)
            for i, layer in enumerate(self.layers):
                x = layer(x, kv[i], there, None if batch.queries is None else batch.queries[i])
            return x[there.wanted]

    def logits(self, hidden: Any) -> np.ndarray:
        """[W, hidden] -> [W, vocab] float32."""
        if self._pass is not None:
            return self._pass.logits(hidden)
        operations = cast(Operations, self.kernels)
        with operations.running():
            return operations.leave(self.head_of(hidden))

    def head_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same by a backend of operations, which stays where it is."""
        operations = cast(Operations, self.kernels)
        return operations.head(operations.norm(hidden, self.norm, self.config.norm_eps), self.head)

    def draw(self, hidden: Any, noises: Sequence[Noise]) -> list[int]:
        """[W, hidden] -> the id of each row's largest logit, with noise, often sooner than by way of all logits."""
        if self._pass is not None:
            return self._pass.draw(hidden, noises)
        return self.kernels.draw(self.logits(hidden), noises)
