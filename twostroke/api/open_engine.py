"""Opening an engine: its models, their pool, its backend and its tiers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twostroke.backends.choose import create_backend, require_device, streaming
from twostroke.backends.interface import Backend
from twostroke.backends.page_memory import HostMemory
from twostroke.backends.ranks.processes import local_ranks
from twostroke.engine.engine import Engine
from twostroke.engine.memory_budget import MemoryBudget
from twostroke.engine.model_loader import ModelLoader, companion_checkpoint, own_draft
from twostroke.engine.options import OWN_DRAFTS, LLMOptions, companion_parts
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.fields import check_arguments, rules
from twostroke.kv.tiers.tiers import Tiers, open_tiers, require_tiers
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.fetch import Progress
from twostroke.models.checkpoints.quantize import quantize
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.models.checkpoints.verify import VerificationReport, verify
from twostroke.system.limits import count_threads

MAIN = "main"  # the model's role in its engine


@dataclass(frozen=True)
class OpenedEngine:
    """An engine, and what it was made of. `LLM` describes the attributes."""

    engine: Engine
    backend: Backend
    tiers: Tiers
    memory: MemoryBudget
    checkpoint: Checkpoint
    verified: VerificationReport | None


def llm_options(arguments: Mapping[str, Any]) -> LLMOptions:
    """The options among arguments of `LLM`, checked as far as this is possible without its model.

    Raises InvalidRequest.
    """
    check_arguments(LLMOptions, arguments)
    require_device(arguments["backend"], arguments["device"], arguments["tp"])
    tiers = ("kv_host", "kv_disk", "kv_disk_bytes", "kv_remote", "kv_compress")
    require_tiers(*(arguments[name] for name in tiers))
    for companion in (arguments["student"], arguments["draft"]):
        if isinstance(companion, str):
            companion_parts(companion)
    return LLMOptions(**{name: arguments[name] for name in rules(LLMOptions)})


def open_engine(options: LLMOptions, progress: Progress | None) -> OpenedEngine:
    """Open an engine. Raises what `LLM` says."""
    tp, page_size, threads = options.tp, options.page_size, options.threads
    threads = max(1, count_threads(None) // tp) if threads is None else count_threads(threads)
    tiers = open_tiers(options.kv_host, options.kv_disk, options.kv_disk_bytes, options.kv_remote, options.kv_compress)
    try:
        model = options.model
        stored = model if isinstance(model, Checkpoint) else open_checkpoint(model, progress=progress)
        if (verified := verify(stored, progress) if options.check else None) is not None:
            verified.require()
        stored = stored.limited(length := options.max_model_len)
        if options.kv_groups == "layers":
            stored = stored.with_layers_apart()
        checkpoint = quantize(stored, options.weights, threads)
        backend = create_backend(
            options.backend, options.device, options.dtype, threads,
            checkpoint.config, checkpoint.matrices(), page_size, tp, options.kv_dtype,
        )  # fmt: skip
        steps = options.max_step_tokens  # a text that is not to be cut has room in one
        steps = max(steps, checkpoint.config.max_position) if checkpoint.config.both_ways else steps
        here, on_host = local_ranks(tp), backend.device == "cpu"
        memory = MemoryBudget.of_engine(  # PyTorch, where the backend computes with it, is loaded by now
            checkpoint.config, steps,
            on_host=on_host, processes=here, host_bytes=tiers.host_bytes, spare=options.spare_bytes,
        )  # fmt: skip
        companions = {
            role: wanted if isinstance(wanted, Checkpoint) else companion_checkpoint(wanted, stored, threads)
            for role, wanted in (("student", options.student), ("draft", options.draft))
            if wanted is not None and wanted not in OWN_DRAFTS
        }
        if options.kv_groups == "layers" and "student" in companions:
            companions["student"] = companions["student"].with_layers_apart()
        if isinstance(options.draft, str) and options.draft in OWN_DRAFTS:
            companions[options.draft] = own_draft(options.draft, stored, options.weights, threads)
        for role, one in companions.items():
            companions[role] = one.limited(length and min(length, one.config.max_position))
        loader = ModelLoader(backend, options.prefix_index, tiers, memory, progress, here / tp)
        if options.stream_weights:
            streaming(backend, checkpoint.config, checkpoint.name)
        resident = not options.stream_weights
        main = loader.load_main(checkpoint, page_size, options.kv_bytes, companions.values(), resident)
        models = {MAIN: main}
        for role, companion in companions.items():
            models[role] = loader.load_companion(role, companion, main, stored, threads, options.check)
        if options.kv_reserve and isinstance(main.pool.memory, HostMemory):
            main.pool.memory.populate()
        scheduler = SchedulerConfig(steps, options.max_running, options.itl_ms)
        engine = Engine(models, MAIN, scheduler, tiers)
    except BaseException:
        tiers.close()
        raise
    return OpenedEngine(engine, backend, tiers, memory, checkpoint, verified)
