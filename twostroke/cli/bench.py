"""`twostroke bench`: how fast a model is on this machine, and in `bench_serve`, how a server does under load."""

import time
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke.cli import bench_serve
from twostroke.cli.options import JsonFlag, PositionalModelOptions, spread
from twostroke.cli.report import print_json, print_lines, progress_bar, size, table_of

if TYPE_CHECKING:
    from twostroke.api.llm import LLM
    from twostroke.study.bench.latency import BatchShape, Latency

app = typer.Typer(help="Measure speed and memory.", no_args_is_help=True)
app.command()(bench_serve.serve)


@app.callback()
def group() -> None:
    """Measure speed and memory."""


def parse_counts(text: str) -> list[int]:
    """`128,512,2048`."""
    try:
        counts = [int(part) for part in str(text).split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number, or several with commas between them") from None
    if min(counts) < 1:
        raise typer.BadParameter(f"{text!r}: numbers must be at least 1")
    return counts


@app.command()
@spread
def latency(
    *,
    prompt_tokens: Annotated[
        Any, typer.Option(parser=parse_counts, metavar="N,...", help="Prompt lengths, random tokens.")
    ] = "512",
    output_tokens: Annotated[Any, typer.Option(parser=parse_counts, metavar="N,...", help="Answer lengths.")] = "64",
    batch: Annotated[Any, typer.Option(parser=parse_counts, metavar="N,...", help="Sequences at once.")] = "1",
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds; medians are reported.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Rounds before them.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the random tokens.")] = 0,
    prompt: Annotated[str | None, typer.Option(help="This text instead of random tokens.")] = None,
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="How many first tokens are always the same; the prefix index is then on.")
    ] = 0,
    as_json: JsonFlag = False,
    model_options: PositionalModelOptions,
) -> None:
    """TTFT, ITL, tokens per second of both strokes, and memory. Several lengths are run in turn, round by round."""
    # A prefix index would skip the prefill that is measured, so it is on only where shared prefixes are measured.
    changes: dict[str, Any] = {} if shared_prefix else {"prefix_index": "off"}
    began = time.perf_counter()
    with model_options.open(**changes) as llm:
        load_s = time.perf_counter() - began
        from twostroke.study.bench.latency import BatchShape, PromptSource

        if prompt is not None:
            prompt_tokens = [len(llm.encode(prompt))]
        shapes = [BatchShape(*counts) for counts in product(prompt_tokens, output_tokens, batch)]
        results = run(llm, shapes, repeats, warmup, PromptSource(seed, shared_prefix, prompt))
        facts = describe(llm, results, load_s)
    if as_json:
        print_json(facts)
        return
    print_table(facts)


def run(llm: "LLM", shapes: "list[BatchShape]", repeats: int, warmup: int, prompts: Any) -> "list[Latency]":
    """Measure, with a bar on stderr where that is a terminal."""
    from twostroke.study.bench.latency import measure

    with progress_bar("measuring", len(shapes) * (repeats + warmup)) as advance:
        return measure(llm, shapes, repeats=repeats, warmup=warmup, prompts=prompts, progress=advance)


def describe(llm: "LLM", results: "list[Latency]", load_s: float) -> dict[str, Any]:
    """All facts, for JSON: the first shape's at the top level, those of all shapes under `results`."""
    from twostroke.engine.timings import DEFINITIONS
    from twostroke.system.machine import describe as describe_machine
    from twostroke.system.machine import peak_rss_bytes

    backend = llm.backend
    common = {
        "model": llm.name,
        "backend": backend.label,
        "device": backend.device,
        "dtype": backend.dtype,
        "kv_dtype": llm.pool.geometry.kv_dtype,
        "threads": backend.threads,
        "load_s": load_s,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    all_facts = [common | result.as_dict() for result in results]
    facts = all_facts[0] | describe_machine(backend.device) | {"definitions": DEFINITIONS}
    return facts | ({"results": all_facts} if len(all_facts) > 1 else {})


def print_table(facts: dict[str, Any]) -> None:
    """A row for each shape."""
    from rich.console import Console

    columns = ("prompt", "output", "batch", "prefill tok/s", "TTFT ms", "decode tok/s", "ITL ms", "ITL p99 ms", "KV")
    table = table_of(*(f">{name}" for name in columns))
    for one in facts.get("results", [facts]):
        table.add_row(
            *(str(one[key]) for key in ("prompt_tokens", "output_tokens", "batch")),
            _number(one["prefill_tokens_per_second"]),
            _number(one["ttft_s"], 1e3),
            _number(one["decode_tokens_per_second"]),
            _number(one["itl_mean_s"], 1e3),
            _number(one["itl_p99_s"], 1e3),
            size(one["kv_bytes"]),
        )
    Console(highlight=False).print(table)
    machine = facts["machine"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    text = (
        f"{facts['model']}, {facts['backend']} {facts['dtype']}, {facts['threads']} threads, "
        f"medians of {facts['repeats']}; loaded in {facts['load_s']:.1f} s, "
        f"peak memory {size(facts['peak_rss_bytes'])}; {where}"
    )
    print_lines([text])


def _number(value: float | None, scale: float = 1.0) -> str:
    return "" if value is None else f"{value * scale:.1f}"
