"""`twostroke explain`: what the engine does with a prompt, step by step."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from twostroke.cli.method_options import MethodOptions
from twostroke.cli.options import JsonFlag, ModelOptions, SamplingOptions, options_of, spread
from twostroke.cli.prompt import PromptOptions
from twostroke.cli.report import ProgressDisplay, note, print_json
from twostroke.fields import rules
from twostroke.sampling.params import SamplingParams
from twostroke.system.atomic_files import check_replaceable


@dataclass(frozen=True)
class ShortSamplingOptions(
    options_of(
        SamplingParams,
        "Sampling",
        leave_out=set(rules(SamplingParams)) - {"max_tokens"},
        changes={"max_tokens": {"default": 12}},
    ),
    SamplingOptions,
):
    """How tokens are chosen; few of them by default."""


@spread
def explain(
    *,
    asked: PromptOptions,
    everything: Annotated[bool, typer.Option("--all", help="Every token, layer, step and candidate.")] = False,
    html: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write all of it as one page that opens offline.")
    ] = None,
    layer: Annotated[
        int | None, typer.Option(min=0, help="Whose attention is shown.", show_default="the one in the middle")
    ] = None,
    head: Annotated[int | None, typer.Option(min=0, help="Of this layer.", show_default="mean over heads")] = None,
    naive: Annotated[int, typer.Option(min=0, help="Tokens that are also made without the cache; 0: none.")] = 8,
    as_json: JsonFlag = False,
    model_options: ModelOptions,
    sampling: ShortSamplingOptions,
    method_options: MethodOptions,
) -> None:
    """Show what the engine does with a prompt: tokens, prefill, attention, layers, decode, cache.

    Every number is the engine's own. With --method, also what the technique does to the cache.
    """
    text = asked.read()
    if html is not None:
        check_replaceable(html)
    params = sampling.params()
    method = method_options.build()
    model_options.check_companions(method)
    with model_options.open() as llm:
        from twostroke.study.explain.explanation import ExplainOptions, explain
        from twostroke.study.explain.explanation import as_json as plain

        tokens = asked.tokens(llm, text)
        aspects = ExplainOptions(layer, head, naive, None if method.name == "plain" else method)
        with ProgressDisplay(f"answering {len(tokens):,} tokens, and watching"):
            made = explain(llm, text, tokens, params, aspects)
        if html is not None:
            from twostroke.study.explain.html_page import write_page

            write_page(html, made)
            note(f"written to {html}")
        if as_json:
            print_json(plain(made))
            return
        from rich.console import Console

        from twostroke.study.explain.terminal import print_explanation

        print_explanation(Console(highlight=False), made, everything)
        facts = made.model
        recurrent = f" ({facts.recurrent} recurrent)" if facts.recurrent else ""
        note(
            f"{facts.name} | {facts.layers} layers{recurrent}, hidden {facts.hidden:,}, {facts.heads} heads, "
            f"{facts.kv_heads} KV heads | {facts.backend} | --all, --json, --html FILE show more"
        )
