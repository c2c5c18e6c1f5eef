"""Weights encoded on load: the matrices of a checkpoint are converted to another format.

`quantize` does what a user asks for; `fitted` what a backend needs, where it has no kernel for the stored format.
"""

from collections.abc import Collection
from dataclasses import replace

from twostroke.errors import InvalidRequest
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.formats.blocks import FORMATS
from twostroke.models.formats.encode import Encoder
from twostroke.models.formats.packed_tensor import PackedTensor
from twostroke.models.formats.simulated_bits import simulated_bits_encoder
from twostroke.models.formats.transcode import SUBSTITUTES, UNPACKED, SubstituteFormat

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
            encoders[name] = simulated_bits_encoder(BITS[own])
            continue
        encoder = Encoder(format, threads)
        near = SUBSTITUTES.get(tensor.format)  # the comparison is with what would be computed with
        grows = encoder.outline(tensor).nbytes >= (Encoder(near.format).outline(tensor) if near else tensor).nbytes
        if tensor.format != format and not (few and grows):
            encoders[name] = encoder
    return replace(checkpoint, encoders=encoders)


def fitted(checkpoint: Checkpoint, formats: Collection[str] | None, threads: int | None = None) -> Checkpoint:
    """The checkpoint with its matrices in `formats`: others are encoded on load (`SUBSTITUTES` says as what)."""
    if formats is None:
        return checkpoint
    encoders = {
        name: Encoder(nearest(checkpoint, name, tensor.format).format, threads)
        for name, tensor in checkpoint.matrices().items()
        if tensor.format not in formats
    }
    return replace(checkpoint, encoders={**checkpoint.encoders, **encoders})


def nearest(checkpoint: Checkpoint, name: str, format: str) -> SubstituteFormat:
    """The format that stands for one that a backend has no kernel for."""
    return UNPACKED if isinstance(checkpoint.stored[name], PackedTensor) else SUBSTITUTES[format]


def changes(before: Checkpoint, after: Checkpoint) -> str:
    """Describe the changes that `fitted` makes, in one line."""
    known, target = before.matrices(), after.matrices()
    kinds: dict[str, None] = {}
    changed = [name for name in target if target[name].format != known[name].format]
    for name in changed:
        near = nearest(before, name, known[name].format)
        change = f"changed by {100 * near.error:.3g}%" if near.error else "exactly"
        stored = before.stored[name]
        kind = stored.method if isinstance(stored, PackedTensor) else stored.format
        kinds[f"{kind} as {near.format} ({change})"] = None
    size = sum(target[name].nbytes for name in changed)
    was = sum(part.nbytes for name in changed for part in before.stored[name].stored())
    return f"{', '.join(kinds)}, {size / 1e6:,.0f} MB in memory for {was / 1e6:,.0f} in the file"
