"""Weights quantized on load: the matrices of a checkpoint are converted to another format."""

from dataclasses import replace

from twostroke.checkpoints.checkpoint import Checkpoint
from twostroke.errors import InvalidRequest
from twostroke.formats.blocks import FORMATS
from twostroke.formats.coarse import coarse
from twostroke.formats.encode import Encoder

FORMAT = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_1", "int3": "Q4_1", "int2": "Q4_1"}
BITS = {"int3": 3, "int2": 2}  # stored in 4 bits: they show the quality of 3 and 2 bits but save no memory


def check_weights(weights: str) -> None:
    """Raises InvalidRequest, naming the choices, for one that does not exist."""
    if weights != "stored" and weights not in FORMAT:
        raise InvalidRequest(f"weights must be one of {', '.join(('stored', *FORMAT))}, not {weights!r}")


def quantize(checkpoint: Checkpoint, weights: str, threads: int | None = None) -> Checkpoint:
    """The checkpoint with its matrices as "bf16", "int8", "int4", "int3" or "int2"; "stored" leaves it unchanged.

    Each call of `tensor` encodes one matrix with `threads` threads and does not keep it, so loading takes the memory
    of the packed weights and of one matrix. Norms and biases are unchanged. With "int4", "int3" and "int2" the head is
    int8, since the head alone in 4 bits loses a third as much quality as all other matrices together (docs/log.md);
    matrices that would not shrink are unchanged.

    Raises:
        InvalidRequest: no such choice, or rows that are not whole groups.
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
                f"weights={weights!r} needs rows of a multiple of {block}, and {tensor.source} has {columns} columns: "
                f"use 'stored' or 'bf16'"
            )
        if own in BITS:
            encoders[name] = coarse(BITS[own])
            continue
        encoder = Encoder(format, threads)
        grows = encoder.outline(tensor).nbytes >= tensor.nbytes
        if tensor.format != format and not (few and grows):
            encoders[name] = encoder
    return replace(checkpoint, encoders=encoders)
