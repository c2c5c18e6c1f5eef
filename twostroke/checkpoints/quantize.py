"""Weights quantized on load: the matrices of a checkpoint in another format than the file's."""

from dataclasses import replace

from twostroke.checkpoints.checkpoint import Checkpoint
from twostroke.errors import InvalidRequest
from twostroke.formats.blocks import FORMATS
from twostroke.formats.coarse import coarse
from twostroke.formats.encode import Encoder

FORMAT = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_1", "int3": "Q4_1", "int2": "Q4_1"}
BITS = {"int3": 3, "int2": 2}  # kept in 4, so they cost what 3 and 2 bits cost in quality and save nothing


def check_weights(weights: str) -> None:
    """Raises InvalidRequest, naming what there is, for a choice that does not exist."""
    if weights != "stored" and weights not in FORMAT:
        raise InvalidRequest(f"weights must be one of {', '.join(('stored', *FORMAT))}, not {weights!r}")


def quantize(checkpoint: Checkpoint, weights: str, threads: int | None = None) -> Checkpoint:
    """The checkpoint with its matrices as "bf16", "int8", "int4", "int3" or "int2"; with "stored" it stays as it is.

    Nothing is read before `tensor` is asked for a matrix, which is then encoded with so many threads and not kept:
    what a backend packs is all the memory that loading takes, and one matrix. Norms and biases stay. From "int4" on the
    head is int8, for in 4 bits it alone costs a third of what all other matrices do together (docs/log.md), and what
    is stored in no more bytes stays as it is.

    Raises:
        InvalidRequest: no such choice, or matrices that do not come in whole groups.
    """
    check_weights(weights)
    if weights == "stored":
        return checkpoint
    head = checkpoint.config.head_tensor
    few = weights in ("int4", *BITS)
    encoders: dict[str, Encoder] = {}
    for name, tensor in checkpoint.matrices().items():
        own = "int8" if few and name == head else weights
        format = FORMAT[own]
        columns, block = tensor.shape[-1], FORMATS[format].block_size
        if columns % block:
            raise InvalidRequest(
                f"weights={weights!r} wants rows of a multiple of {block}, and {tensor.source} has {columns} columns: "
                f"take 'stored' or 'bf16'"
            )
        if own in BITS:
            encoders[name] = coarse(BITS[own])
            continue
        encoder = Encoder(format, threads)
        grows = encoder.outline(tensor).nbytes >= tensor.nbytes
        if tensor.format != format and not (few and grows):
            encoders[name] = encoder
    return replace(checkpoint, encoders=encoders)
