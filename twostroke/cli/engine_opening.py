"""How the engine's process of `twostroke serve` opens its model. It runs there, and reports to the same terminal."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from twostroke.api.llm import LLM
from twostroke.cli.options import ModelOptions
from twostroke.cli.serve_options import StepOptions
from twostroke.server.engine_process.launch import EngineProcess, Launch, launch_of
from twostroke.server.engine_process.messages import OpenOptions
from twostroke.system.limits import usable_cores


def open_served(options: ModelOptions, steps: StepOptions, spare_bytes: int, kv_bytes: int | None) -> LLM:
    """Open it. `kv_bytes` are the options' own, or those of an earlier process of the same server."""
    llm = options.open(
        announced=True,
        max_running=steps.max_running,
        itl_ms=steps.objective,
        spare_bytes=spare_bytes,
        kv_bytes=kv_bytes,
    )
    if steps.itl_ms == "auto":
        llm.engine.choose_itl()
    return llm


def opening_of(
    options: ModelOptions, steps: StepOptions, server_bytes: int, method_modules: Sequence[str], log_format: str
) -> OpenOptions:
    """What tells a process to open a model; `server_bytes` are to stay free for the server beside it."""
    spare = options.spare_bytes + server_bytes
    arguments = {"options": options, "steps": steps, "spare_bytes": spare, "kv_bytes": options.kv_bytes}
    return OpenOptions(open_served, arguments, 0, method_modules, log_format, options.draft is None)


def replicas_of(opening: OpenOptions, count: int, take: Callable[[], EngineProcess]) -> list[Launch]:
    """What starts the processes of each replica, on cores of its own and with its part of the memory."""
    from twostroke.backends.page_memory import host_kv_room
    from twostroke.backends.ranks.processes import cores_of

    arguments = dict(opening.arguments)
    options: ModelOptions = arguments["options"]
    kv_bytes = arguments["kv_bytes"] or host_kv_room() // count
    options = replace(options, threads=options.threads or max(1, usable_cores() // count))
    made: list[Launch] = []
    for number, cores in enumerate(cores_of(count)):
        before = number * kv_bytes  # of the pools of others, which take memory once they are written
        own = {"options": options, "kv_bytes": kv_bytes, "spare_bytes": arguments["spare_bytes"] + before}
        mine = replace(opening, arguments=arguments | own, cores=cores, tells_pages=True)
        made.append(launch_of(mine, take))
    return made
