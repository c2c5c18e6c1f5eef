"""Formats of weights in plans: bytes of each kind of matrix, and the arithmetic that they are multiplied with."""

from collections.abc import Mapping
from dataclasses import dataclass

from twostroke.errors import InvalidRequest
from twostroke.models.formats.blocks import FORMATS as STORED
from twostroke.study.plan.specification import ModelSpec, WeightMatrix


def _bytes(stored: str) -> float:
    """Bytes per weight of a format of GGUF files, with its scales."""
    return STORED[stored].block_bytes / STORED[stored].block_size


Q8, Q4 = _bytes("Q8_0"), _bytes("Q4_1")
G128 = (4 + (16 + 4) / 128) / 8  # 4 bits, and per 128 weights a float16 scale and a 4-bit zero (GPTQ, AWQ)


@dataclass(frozen=True)
class WeightFormat:
    """Bytes per weight of each kind of matrix.

    Attributes:
        layer, expert, head, embedding: bytes per weight.
        arithmetic: dtypes that products may be computed in, the fastest first; a machine takes the first it has.
        help: one sentence.
    """

    name: str
    layer: float
    expert: float
    head: float
    embedding: float
    arithmetic: tuple[str, ...]
    help: str

    def matrix(self, matrix: WeightMatrix) -> float:
        """Bytes per weight of a matrix. Routers are float32 in the engine, and small everywhere."""
        if matrix.name == "router":
            return 4
        return self.head if matrix.part == "head" else self.expert if matrix.copies > 1 else self.layer

    def total(self, model: ModelSpec) -> int:
        """Bytes of all weights. Norms, biases and other vectors are counted with 2 bytes."""
        layers = sum(count * matrix.parameters * self.matrix(matrix) for count, matrix in model.matrices())
        table = model.vocab * model.hidden
        outer = table * (self.head if model.tied else self.head + self.embedding)
        return round(layers + outer + 2 * model.other_parameters)


FORMATS: Mapping[str, WeightFormat] = {
    one.name: one
    for one in (
        WeightFormat("bf16", 2, 2, 2, 2, ("bf16",), "two bytes a weight (float16 is the same)"),
        WeightFormat("fp8", 1, 1, 2, 2, ("fp8", "bf16"), "one byte; embedding and head in bf16"),
        WeightFormat("int8", Q8, Q8, Q8, Q8, ("int8", "bf16"), "8 bits and a scale for 32 weights (GGUF's Q8_0)"),
        WeightFormat(
            "int4", Q4, Q4, Q8, Q4, ("int8", "bf16"), "4 bits, scale and minimum for 32 (Q4_1); the head in 8 bits"
        ),
        WeightFormat("int4-g128", G128, G128, 2, 2, ("bf16",), "4 bits in groups of 128 (GPTQ, AWQ); the rest bf16"),
        WeightFormat("mxfp4", 2, _bytes("MXFP4"), 2, 2, ("bf16",), "experts in MXFP4, everything else in bf16"),
    )
}


def weight_format(name: str) -> WeightFormat:
    """The format of that name. Raises InvalidRequest, which lists all."""
    if name not in FORMATS:
        raise InvalidRequest(f"weights must be one of {', '.join(FORMATS)}, not {name!r}")
    return FORMATS[name]
