"""Formats of weights in plans: bytes of each kind of matrix, and the arithmetic that they are multiplied with."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from twostroke.errors import InvalidRequest
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.formats.blocks import FORMATS as STORED
from twostroke.study.roofline.layer_kind import WeightMatrix
from twostroke.study.roofline.machines import MachineSpec
from twostroke.study.roofline.model_spec import ModelSpec


def _bytes(stored: str) -> float:
    """Bytes per weight of a format of GGUF files, with its scales."""
    return STORED[stored].block_bytes / STORED[stored].block_size


Q8, Q4 = _bytes("Q8_0"), _bytes("Q4_1")
G128 = (4 + (16 + 4) / 128) / 8  # 4 bits, and per 128 weights a float16 scale and a 4-bit zero (GPTQ, AWQ)
NVFP4 = (4 + 8 / 16) / 8  # 4 bits, and an FP8 scale for 16 weights


@dataclass(frozen=True)
class WeightFormat:
    """Bytes per weight of each kind of matrix.

    A name says what is stored and what is multiplied: W4A8 is weights of 4 bits with activations of 8.
    """

    name: str
    # layer, expert, head, embedding: bytes per weight
    layer: float
    expert: float
    head: float
    embedding: float
    # dtypes that products may be computed in, the fastest first; a machine takes the first it has
    arithmetic: tuple[str, ...]
    help: str  # one sentence
    engine: str = ""  # what `--weights` of this engine calls it; empty if this engine does not have it

    def title(self, machine: MachineSpec) -> str:
        """What is stored and what is multiplied on this machine, such as "int4 weights, int8 products"."""
        return f"{self.name.partition('-')[0]} weights, {machine.dtype(self.arithmetic)} products"

    def matrix(self, matrix: WeightMatrix) -> float:
        """Bytes per weight of a matrix. Routers are float32 in the engine, and small everywhere."""
        if matrix.name == "router":
            return 4
        return self.head if matrix.part == "head" else self.expert if matrix.of_experts else self.layer

    def total(self, model: ModelSpec) -> int:
        """Bytes of all weights. Norms, biases and other vectors are counted with 2 bytes."""
        layers = sum(count * matrix.parameters * self.matrix(matrix) for count, matrix in model.matrices)
        config, table = model.config, model.vocab * model.hidden
        outer = 0 if config.takes_hidden else table * (self.head if config.tied else self.head + self.embedding)
        return round(layers + outer + 2 * model.other_parameters)


FORMATS: Mapping[str, WeightFormat] = {
    one.name: one
    for one in (
        WeightFormat("bf16", 2, 2, 2, 2, ("bf16",), "two bytes a weight (float16 is the same)", "bf16"),
        WeightFormat("fp8-w8a8", 1, 1, 2, 2, ("fp8", "bf16"), "one byte; embedding and head in bf16"),
        WeightFormat("int8-w8a8", Q8, Q8, Q8, Q8, ("int8", "bf16"), "8 bits, a scale for 32 (GGUF's Q8_0)", "int8"),
        WeightFormat(
            "nvfp4-w4a4", NVFP4, NVFP4, 2, 2, ("fp4", "bf16"), "4 bits, an FP8 scale for 16; embedding and head in bf16"
        ),
        WeightFormat(
            "int4-w4a8", Q4, Q4, Q8, Q4, ("int8", "bf16"), "4 bits, scale and minimum for 32 (Q4_1); head in 8", "int4"
        ),
        WeightFormat("int4-w4a16", G128, G128, 2, 2, ("bf16",), "4 bits in groups of 128 (GPTQ, AWQ); the rest bf16"),
        WeightFormat("mxfp4-w4a16", 2, _bytes("MXFP4"), 2, 2, ("bf16",), "experts in MXFP4, everything else in bf16"),
    )
}
# Names that do not say what is multiplied, as other tools and this engine use them.
SHORT_NAMES = {
    "fp8": "fp8-w8a8", "int8": "int8-w8a8", "int4": "int4-w4a8", "int4-g128": "int4-w4a16", "mxfp4": "mxfp4-w4a16",
}  # fmt: skip


def weight_format(name: str) -> WeightFormat:
    """The format of that name, whole or short. Raises InvalidRequest, which lists all."""
    found = FORMATS.get(SHORT_NAMES.get(name, name))
    if found is None:
        raise InvalidRequest(f"weights must be one of {', '.join(FORMATS)}, not {name!r}")
    return found


def stored_format(checkpoint: Checkpoint) -> WeightFormat:
    """The mean bytes per weight of a checkpoint's own matrices, in and outside of layers."""
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, tensor in checkpoint.matrices().items():
        part = name if name in ("embed", "head") else "expert" if ".experts." in name else "layer"
        sizes[part] += tensor.nbytes
        counts[part] += tensor.num_elements
    mean = {part: sizes[part] / counts[part] for part in sizes}
    whole = sum(sizes.values()) / sum(counts.values())
    layer, expert, embedding = (mean.get(part, whole) for part in ("layer", "expert", "embed"))
    arithmetic = ("bf16",) if layer >= 2 else ("int8", "bf16")
    return WeightFormat(
        "stored", layer, expert, mean.get("head", embedding), embedding, arithmetic, "as the file has them", "stored"
    )
