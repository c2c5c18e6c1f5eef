"""Exact memory of the engine on this machine, and the command that starts a configuration."""

from collections import Counter
from dataclasses import dataclass
from math import prod

from twostroke.backends.native.weights import PANEL, packed_bytes
from twostroke.checkpoints.checkpoint import Checkpoint
from twostroke.checkpoints.quantize import fitted, quantize
from twostroke.kv.geometry import Geometry
from twostroke.models.config import is_weight_matrix
from twostroke.planning.weights import WeightFormat

KV_DTYPE = "bfloat16"  # of the native backend
PAGE_SIZE = 16


@dataclass(frozen=True)
class EngineMemory:
    """Bytes that the native backend allocates.

    Attributes:
        matrices: packed weights; an embedding that is not the head stays in its file and is not among them.
        vectors: norms, biases and routers, in float32.
        page: one KV page of 16 entries of all layers. Layers with windows keep all entries here.
    """

    matrices: int
    vectors: int
    page: int

    def pages(self, tokens: int) -> int:
        """Pages of a sequence of that many entries."""
        return -(-tokens // PAGE_SIZE)

    def pool(self, sequences: int, tokens: int) -> int:
        """Bytes of KV for that many sequences of that length: what --kv-bytes has to be."""
        return sequences * self.pages(tokens) * self.page


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
        "stored", layer, expert, mean.get("head", embedding), embedding, arithmetic, "as the file has them"
    )


def engine_memory(checkpoint: Checkpoint, formats: tuple[str, ...], weights: str = "stored") -> EngineMemory:
    """What the engine will allocate for a checkpoint; no weights are read.

    Args:
        checkpoint: opened files.
        formats: formats that the backend has kernels for.
        weights: as for `LLM`.
    """
    config, made = checkpoint.config, fitted(quantize(checkpoint, weights), formats)
    matrices = made.matrices()
    if not config.tied:
        del matrices["embed"]
    packed = sum(packed_bytes(one.format, -(-one.shape[0] // PANEL) * PANEL, one.shape[1]) for one in matrices.values())
    others = (one for name, one in made.stored.items() if not is_weight_matrix(name, one.shape))
    page = PAGE_SIZE * Geometry.of(config, KV_DTYPE, tokenizer="").entry_bytes
    return EngineMemory(packed, sum(4 * prod(one.shape) for one in others), page)


def serve_command(
    model: str, weights: str, kv_bytes: int, concurrency: int, itl_ms: float | None, chunk: int = 512
) -> list[str]:
    """The arguments that start this configuration: `twostroke serve ...`."""
    command = ["twostroke", "serve", "--model", model, "--kv-bytes", str(kv_bytes)]
    command += ["--max-running", str(concurrency), "--max-step-tokens", str(chunk)]
    if weights != "stored":
        command += ["--weights", weights]
    return [*command, "--itl-ms", "auto" if itl_ms is None else f"{max(itl_ms, 1):g}"]
