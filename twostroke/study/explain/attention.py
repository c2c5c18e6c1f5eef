"""The attention of one token: its query from the engine's own pass, applied to the keys in the pool."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from twostroke.api.llm import LLM
from twostroke.api.scoring import TextOrTokens
from twostroke.engine.request import Request
from twostroke.engine.strokes import Prefill, Prefilled, Program
from twostroke.errors import InvalidRequest
from twostroke.kv.attention import Queries, attention_weights
from twostroke.kv.cache import KVCache
from twostroke.models.config import ModelConfig
from twostroke.sampling.params import SamplingParams


@dataclass(frozen=True)
class TokenAttention:
    """The attention weights of one entry's query."""

    tokens: list[int]  # the ids of the entries that it may attend to; the last one is its own
    positions: list[int]  # their positions
    # the layers with attention, by their indices in the model; recurrent layers attend to nothing
    layers: tuple[int, ...]
    weights: np.ndarray  # [layers, Hq, n] float32, each head's sum to 1; 0 for an entry outside of a sliding window

    @classmethod
    def of(cls, kv: KVCache, queries: Queries) -> "TokenAttention":
        """The attention of a value's last entry, whose query is the last of `queries`."""
        last, recurrent = replace(queries, rows=queries.rows[:, -1:]), dict(kv.pool.geometry.states)
        every = range(len(queries.windows) + len(recurrent))
        layers = tuple(layer for layer in every if layer not in recurrent)
        weights = np.stack([weights[:, 0] for weights in attention_weights(kv, last)])
        return cls(kv.tokens, kv.positions, layers, weights)

    def mean(self, layer: int | None = None, head: int | None = None) -> np.ndarray:
        """[n] weights of a head in a layer; the mean over all layers, or all heads, where none is named.

        Raises InvalidRequest if the model has no such layer or head, or if the layer is recurrent.
        """
        if head is not None:
            check_index("head", head, self.weights.shape[1])
        if layer is not None:
            require_attention(layer, self.layers)
        heads = self.weights.mean(1) if head is None else self.weights[:, head]
        return heads.mean(0) if layer is None else heads[self.layers.index(layer)]

    def most(self, count: int, layer: int | None = None, head: int | None = None) -> list[tuple[int, float]]:
        """The entries with the largest weights of `mean`: (index, weight), falling."""
        weights = self.mean(layer, head)
        return [(int(i), float(weights[i])) for i in np.argsort(-weights, kind="stable")[:count]]


def check_index(name: str, index: int, count: int) -> None:
    """Raise InvalidRequest unless 0 <= index < count."""
    if not 0 <= index < count:
        raise InvalidRequest(f"{name} must be from 0 to {count - 1}, not {index}")


def require_attention(layer: int, attending: Collection[int], count: int | None = None) -> None:
    """Raise InvalidRequest unless a layer is one of those with attention; `count`: of all layers, if it is known."""
    check_index("layer", layer, count or max(attending) + 1)
    if layer not in attending:
        those = ", ".join(map(str, sorted(attending)))
        raise InvalidRequest(f"layer {layer} is recurrent and attends to nothing: layers with attention are {those}")


def chosen_layer(config: ModelConfig, layer: int | None) -> int:
    """The layer whose attention is shown; None is the middle one with attention. Raises InvalidRequest."""
    attending = list(config.attention_layers)
    if layer is None:
        return attending[len(attending) // 2]
    require_attention(layer, attending, config.num_layers)
    return layer


def attention_request(llm: LLM, prompt: TextOrTokens | KVCache, position: int | None = None) -> Request:
    """A request whose result has the query of the entry with index `position`, by default the last, and its value.

    `TokenAttention.of(result.kv, result.queries)` is its attention. For a long prompt that takes a part of a second, in
    which a server's engine should not stand still, so it is not done in the engine's step.

    Only that entry is computed if the prefix index, or the value, has those before it. A token is chosen from the row
    of the entry before it: what the model looked at when it wrote token i is asked for with position i - 1.

    Raises InvalidRequest: no such entry, or ids outside the vocabulary.
    """
    tokens = prompt.tokens if isinstance(prompt, KVCache) else llm.encode(prompt)
    index = len(tokens) - 1 if position is None else position
    if not tokens:
        raise InvalidRequest("the prompt is empty: give at least one token")
    check_index("position", index, len(tokens))

    value = prompt if isinstance(prompt, KVCache) else None
    program = partial(_query_program, value, tokens[: index + 1])
    return Request(program, SamplingParams(max_tokens=1), llm.tokenizer, index + 1)


def _query_program(kv: KVCache | None, tokens: list[int]) -> Program:
    if kv is None:
        return (yield Prefill(tokens, logits="none", queries=1))
    index = len(tokens) - 1
    before = kv[:index].resumed_at(kv.positions[index])
    return (yield Prefill(tokens[index:], before.with_tail(None), logits="none", queries=1))


def attention_of(llm: LLM, prompt: TextOrTokens | KVCache, position: int | None = None) -> TokenAttention:
    """The attention of one token of a prompt, computed at once.

    Raises what `attention_request` and `LLM.prefill` raise.
    """
    request = attention_request(llm, prompt, position)
    llm.engine.run([request])
    made: Prefilled = request.result
    return TokenAttention.of(made.kv, made.queries)
