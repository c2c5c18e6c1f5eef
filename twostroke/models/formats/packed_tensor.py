"""A matrix that a checkpoint holds in several tensors: codes, scales, zero points."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from twostroke.models.formats.blocks import FORMATS
from twostroke.models.formats.tensor import RawTensor


@dataclass(frozen=True, eq=False)
class PackedTensor(RawTensor):
    """A matrix that `unpack` makes in `format`, without loss, each time; until then `data` are zeros without memory."""

    method: str  # for people: "GPTQ 4-bit"
    parts: tuple[RawTensor, ...]
    make: Callable[[], np.ndarray]  # uint8, (rows, row_bytes) of `format`
    share: float = 1.0  # of the bytes of `parts`, where other matrices have the rest

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        format: str,
        source: str,
        method: str,
        parts: tuple[RawTensor, ...],
        make: Callable[[], np.ndarray],
        share: float = 1.0,
    ) -> "PackedTensor":
        data = np.broadcast_to(np.uint8(0), (shape[0], FORMATS[format].row_bytes(shape[1])))
        return cls(source.rpartition(": ")[2], format, shape, data, source, method, parts, make, share)

    @property
    def nbytes(self) -> int:
        return round(self.share * sum(part.nbytes for part in self.parts))

    def rows(self, start: int, stop: int) -> RawTensor:
        outline = super().rows(start, stop)
        make, share = self.make, self.share * (stop - start) / self.shape[0]
        return replace(self, shape=outline.shape, data=outline.data, make=lambda: make()[start:stop], share=share)

    def outline(self) -> RawTensor:
        return RawTensor(self.name, self.format, self.shape, self.data, self.source)

    def unpack(self) -> RawTensor:
        data = self.make()
        for part in self.parts:
            part.release()
        return RawTensor(self.name, self.format, self.shape, data.reshape(self.data.shape), self.source)

    def stored(self) -> tuple[RawTensor, ...]:
        return self.parts
