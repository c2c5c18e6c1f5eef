"""Exact memory of the engine on this machine, and the command that starts a configuration."""

from dataclasses import dataclass
from math import prod

from twostroke.backends.native import library
from twostroke.backends.native.backend import unsupported
from twostroke.backends.native.weights import FORMATS, PANEL, packed_bytes
from twostroke.engine.options import GUESSER
from twostroke.kv.geometry import Geometry
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.quantize import fitted, quantize
from twostroke.models.tensor_shapes import is_weight_matrix
from twostroke.study.plan.plan import Plan

PAGE_SIZE = 16


@dataclass(frozen=True)
class EngineMemory:
    """Bytes that the engine allocates."""

    backend: str  # the one that will be chosen, "native" or "reference"
    # weights in the backend's form. An embedding that is not the head stays in its file on the native backend, and is
    # not among them.
    matrices: int
    vectors: int  # norms, biases and routers
    geometry: Geometry  # of its KV, in pages of 16 entries

    @property
    def page(self) -> int:
        """Bytes of a KV page."""
        return self.geometry.page_bytes(PAGE_SIZE)

    def pages(self, tokens: int, at_once: int = 1) -> int:
        """Pages of a sequence of that many entries, of which `at_once` come in one step."""
        return self.geometry.num_pages(tokens, PAGE_SIZE, at_once)

    def pool(self, sequences: int, tokens: int, at_once: int = 1) -> int:
        """Bytes of KV for that many sequences of that length: what --kv-bytes has to be."""
        return sequences * self.pages(tokens, at_once) * self.page


def engine_memory(checkpoint: Checkpoint, weights: str = "stored", kv_dtype: str = "auto") -> EngineMemory:
    """What the engine will allocate on a CPU for a checkpoint; no weights are read.

    Args:
        checkpoint: opened files.
        weights, kv_dtype: as for `LLM`.
    """
    config, stored = checkpoint.config, quantize(checkpoint, weights)
    if library.unavailable() is None and not unsupported(config, stored.matrices(), PAGE_SIZE):
        return _native(fitted(stored, FORMATS), "bfloat16" if kv_dtype == "auto" else kv_dtype)
    shapes = {name: prod(one.shape) for name, one in stored.stored.items() if not (name == "head" and config.tied)}
    matrices = sum(count for name, count in shapes.items() if is_weight_matrix(name, stored.stored[name].shape))
    geometry = Geometry.of(config, "float32" if kv_dtype == "auto" else kv_dtype, tokenizer="")
    return EngineMemory("reference", 4 * matrices, 4 * (sum(shapes.values()) - matrices), geometry)


def _native(made: Checkpoint, kv_dtype: str) -> EngineMemory:
    matrices = made.matrices()
    if not made.config.tied:
        del matrices["embed"]
    packed = sum(packed_bytes(one.format, -(-one.shape[0] // PANEL) * PANEL, one.shape[1]) for one in matrices.values())
    others = (one for name, one in made.stored.items() if not is_weight_matrix(name, one.shape))
    vectors = sum(4 * prod(one.shape) for one in others)
    return EngineMemory("native", packed, vectors, Geometry.of(made.config, kv_dtype, tokenizer=""))


def pool_bytes(plan: Plan, memory: EngineMemory) -> int:
    """What --kv-bytes has to be for all sequences of a plan at once, and one prefill by its steps."""
    load, technique = plan.workload, plan.technique
    held = technique.held(load.prompt, load.output)
    passing = max(0, technique.entered(load.prompt) - held)
    # Pages of which a technique keeps a part, one in each group of layers.
    cut = 2 * load.concurrency * len(memory.geometry.groups) * memory.page if technique.method else 0
    return memory.pool(load.concurrency - 1, held) + memory.pool(1, held, plan.budget) + memory.pool(1, passing) + cut


def serve_command(plan: Plan, model: str, weights: str, memory: EngineMemory, draft: str | None = None) -> list[str]:
    """The arguments that start this configuration: `twostroke serve ...`.

    Args:
        plan: what is to be served.
        model, weights: as for `LLM`.
        memory: of this model with these weights.
        draft: for `--draft`; a student is "int4".
    """
    load, technique = plan.workload, plan.technique
    chunk = min(plan.budget, max(16, plan.largest_chunk() or 16))
    command = ["twostroke", "serve", "--model", model, "--kv-bytes", str(pool_bytes(plan, memory))]
    command += ["--max-running", str(load.concurrency), "--max-step-tokens", str(max(chunk, load.concurrency))]
    if weights != "stored":
        command += ["--weights", weights]
    if plan.model.kv_bits < 16:
        command += ["--kv-dtype", plan.model.stored.name]
    if technique.role:
        command += ["--student", "int4"] if technique.role == "student" else ["--draft", draft or GUESSER]
    if plan.machine.kind == "gpu":
        command += ["--device", "cuda"]
    return [*command, "--itl-ms", "auto" if load.itl_ms is None else f"{max(load.itl_ms, 1):g}"]
