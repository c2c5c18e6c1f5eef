"""How a model that takes hidden states joins them with its tokens' embeddings (`ModelConfig.takes_hidden`)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from twostroke.models.formats.tensor import RawTensor
from twostroke.models.tensor_shapes import JOIN_NORMS

ONE_PROCESS = "it computes heads of multi-token prediction in one process: leave out tp, or draft"


@dataclass(frozen=True)
class HiddenInputs:
    """What a model that takes hidden states (`ModelConfig.takes_hidden`) gets beside its rows' tokens."""

    rows: np.ndarray  # [N, hidden] float32, behind a model's last layer and before its last norm
    own: np.ndarray  # [N] bool, whether that model is this one, and not the one that it guesses for


@dataclass(frozen=True)
class HiddenJoin:
    """The norms before the projection.

    A hidden state passes the last norm of the model that it comes from, then the projection's own: so vLLM's
    `qwen3_next_mtp.py` has it, and llama.cpp's `h_nextn`.
    """

    embed_norm: np.ndarray
    hidden_norm: np.ndarray
    main_norm: np.ndarray
    own_norm: np.ndarray
    eps: float

    @classmethod
    def of(cls, weights: Callable[[str], RawTensor], eps: float) -> "HiddenJoin":
        """That of a checkpoint."""
        embed, hidden, main = (weights(name).dequantize() for name in JOIN_NORMS)
        return cls(embed, hidden, main, weights("norm").dequantize(), eps)

    def __call__(self, embeddings: np.ndarray, hidden: HiddenInputs) -> np.ndarray:
        """The projection's inputs, from embeddings [N, hidden] float32: [N, 2 hidden] float32, each row by itself."""
        last = np.where(hidden.own[:, None], self.own_norm, self.main_norm)
        states = self._normed(self._normed(hidden.rows, last), self.hidden_norm)
        return np.concatenate([self._normed(embeddings, self.embed_norm), states], 1)

    def _normed(self, rows: np.ndarray, norm: np.ndarray) -> np.ndarray:
        squares = np.square(rows.astype(np.float64)).mean(1, keepdims=True)
        return (rows / np.sqrt(squares + self.eps)).astype(np.float32) * norm
