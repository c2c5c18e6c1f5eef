"""Which class a text has, by a model with a head for it. It takes prefills alone."""

from dataclasses import dataclass, replace

import numpy as np

from twostroke.api.embedding import Embedder
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.classes import ClassHead
from twostroke.models.checkpoints.pooling import Pooling


@dataclass(frozen=True)
class TextClass:
    """What a model says of a text.

    Attributes:
        label: the class with the largest score.
        scores: by label: probabilities, or the logits themselves of a model for regression.
    """

    label: str
    scores: dict[str, float]


@dataclass(frozen=True)
class Classifier:
    """One model's classes. `embedder` gives the last token's hidden state behind the last norm."""

    head: ClassHead
    embedder: Embedder

    @classmethod
    def of(cls, checkpoint: Checkpoint, embedder: Embedder) -> "Classifier | None":
        """That of a checkpoint; None for one without such a head."""
        head = checkpoint.classes
        return None if head is None else cls(head, replace(embedder, pooling=Pooling("last")))

    def finish(self, pooled: np.ndarray) -> TextClass:
        """The class of a text with this hidden state, [hidden]. Its bits depend on that text alone."""
        head = self.head
        logits = (head.weight.astype(np.float64) * pooled).sum(1) + (0 if head.bias is None else head.bias)
        match head.activation:
            case "softmax":
                odds = np.exp(logits - logits.max())
                scores = odds / odds.sum()
            case "sigmoid":
                scores = 1 / (1 + np.exp(-logits))
            case "none":
                scores = logits
        return TextClass(head.labels[int(np.argmax(scores))], dict(zip(head.labels, scores.tolist(), strict=True)))
