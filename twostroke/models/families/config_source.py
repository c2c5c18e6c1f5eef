"""The metadata that families read from checkpoints."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Literal

from twostroke.errors import CheckpointError, UnsupportedArchitecture
from twostroke.models.rope import Rope

MAX_NUMBER = 1e300  # of numbers, which may be integers of any length in config.json
MAX_COUNT = 1 << 31  # no count in a real checkpoint comes near; a damaged one must not make us allocate by it


class ConfigSource(ABC):
    """A checkpoint's metadata. Bad values raise CheckpointError, which names the file and the key."""

    format: ClassVar[Literal["gguf", "huggingface"]]
    path: Path
    vocab_size: int
    tied: bool
    num_layers: int
    # a layer's matrices that have biases, if the family lets a checkpoint choose: of q, k, v, o and MLPs
    biases: frozenset[str]
    # matrices in the checkpoint's tensors, or more. No model has more: a damaged count must not be believed.
    num_matrices: int
    without_values: frozenset[int] = frozenset()  # layers that have no matrix of v, where only the file's tensors tell

    @abstractmethod
    def get(self, key: str) -> Any:
        """The unchecked value, or the family's default; None if there is neither."""

    @abstractmethod
    def rope(self, head_dim: int, kind: str | None = None) -> Rope:
        """The RoPE of one kind of layers ("full_attention", "sliding_attention"), or of all layers."""

    def has(self, part: str) -> bool:
        """Whether the first layer has a tensor for a part, where only the file's tensors tell."""
        return False

    def name(self, key: str) -> str:
        """What the checkpoint calls a key of config.json."""
        return key

    @property
    @abstractmethod
    def architecture(self) -> str:
        """What the checkpoint calls the family."""

    def per_layer(self, key: str) -> Any:
        """The unchecked value for every layer. Raises UnsupportedArchitecture if layers differ in it."""
        return self.get(key)

    def integer(self, key: str, default: int | None = None, limit: int = MAX_COUNT) -> int:
        """The value of a key, a positive integer below `limit`."""
        value = self.per_layer(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < limit:
            raise self.bad(key, "a positive integer", value)
        return value

    def integers(self, key: str) -> list[int]:
        """The value of a key for each layer: a positive integer, or a list of them."""
        values = self.get(key)
        if not isinstance(values, list):
            return [self.integer(key)] * self.num_layers
        if len(values) != self.num_layers or not all(type(one) is int and 0 < one < MAX_COUNT for one in values):
            raise self.bad(key, f"a list of {self.num_layers} positive integers", values)
        return values

    def number(self, key: str, default: float | None = None) -> float:
        """The value of a key, a positive number."""
        value = self.get(key)
        return self.checked(key, default if value is None else value)

    def checked(self, key: str, value: Any) -> float:
        """The value, if it is a positive number."""
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not 0 < value < MAX_NUMBER:  # a NaN is neither
            raise self.bad(key, "a positive number", value)
        return float(value)

    def wrong(self, key: str, expected: str) -> CheckpointError:
        """An error that says which value is expected for a key, and which was found."""
        return self.bad(key, expected, self.get(key))

    def bad(self, key: str, expected: str, value: Any) -> CheckpointError:
        """An error that says which value is expected for a key, and that this one was found."""
        shown = "missing" if value is None else f"{value!r:.40}"
        return CheckpointError(f"{self.path}: {self.name(key)} must be {expected}; it is {shown}")

    def unsupported(self, what: str) -> UnsupportedArchitecture:
        """An error that says that the architecture with `what` is not supported."""
        return UnsupportedArchitecture(
            f"{self.path}: architecture {self.architecture} with {what:.80} is not supported"
        )
