"""Weights quantized on load: the matrices of a checkpoint in another format than the file's."""

from dataclasses import replace

from twostroke.checkpoints.checkpoint import Checkpoint
from twostroke.errors import InvalidRequest
from twostroke.kernels.encode import Encoder
from twostroke.kernels.formats import FORMATS

# What matrices become, and which formats are left as they are because they would only lose.
CHOICES: dict[str, tuple[str, tuple[str, ...]]] = {
    "bf16": ("BF16", ("BF16",)),
    "int8": ("Q8_0", ("Q8_0",)),
    "int4": ("Q4_1", ("Q4_0", "Q4_1", "Q4_K")),
}


def check_weights(weights: str) -> None:
    """Raises InvalidRequest, naming what there is, for a choice that does not exist."""
    if weights != "stored" and weights not in CHOICES:
        raise InvalidRequest(f"weights must be one of {', '.join(('stored', *CHOICES))}, not {weights!r}")


def quantize(checkpoint: Checkpoint, weights: str, threads: int | None = None) -> Checkpoint:
    """The checkpoint with its matrices as "bf16", "int8" or "int4"; with "stored" it stays as it is.

    Nothing is read before `tensor` is asked for a matrix, which is then encoded with so many threads and not kept:
    what a backend packs is all the memory that loading takes, and one matrix. Norms and biases stay, and with "int4"
    the head is int8: in 4 bits it alone costs a third of what all other matrices do together (docs/log.md).

    Raises:
        InvalidRequest: no such choice, or matrices that do not come in whole groups.
    """
    check_weights(weights)
    if weights == "stored":
        return checkpoint
    head = "embed" if checkpoint.config.tied else "head"
    encoders: dict[str, Encoder] = {}
    for name, tensor in checkpoint.matrices().items():
        format, settled = CHOICES["int8" if (weights, name) == ("int4", head) else weights]
        if tensor.format in settled:
            continue
        columns, block = tensor.shape[-1], FORMATS[format].block_size
        if columns % block:
            raise InvalidRequest(
                f"weights={weights!r} wants rows of a multiple of {block}, and {tensor.source} has {columns} columns: "
                f"take 'stored' or 'bf16'"
            )
        encoders[name] = Encoder(format, threads)
    return replace(checkpoint, encoders=encoders)
