"""The page: the answer, what to do, four plots, every change alone, and what all of it rests on. Nothing is loaded."""

import html
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from twostroke.errors import InvalidRequest
from twostroke.planning.account import title
from twostroke.planning.advice import PROBLEMS
from twostroke.planning.page.plots import plots
from twostroke.planning.plan import Plan

KINDS = {"nothing to do": "good", "misses the objective": "warn", "does not fit": "bad"}


def write_page(path: Path, plan: Plan, advised: Plan | None, facts: Mapping[str, Any]) -> None:
    """Write the page of a plan and its account. Raises InvalidRequest if the file cannot be written."""
    try:
        path.write_text(render(plan, advised, facts))
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}") from None


def render(plan: Plan, advised: Plan | None, facts: Mapping[str, Any]) -> str:
    """The page's text; `advised` is the plan with all advice, None where there is none."""
    here = files("twostroke.planning.page")
    name = f"{facts['model']} on {facts['devices']} x {facts['machine']}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_e(name)}</title><style>{here.joinpath('page.css').read_text()}</style></head><body>"
        f"<header><h1>{_e(name)}</h1><button id=theme>light / dark</button></header>"
        f"{''.join(_body(plan, advised, facts))}"
        f"<div id=told hidden></div><script>{here.joinpath('page.js').read_text()}</script></body></html>\n"
    )


def _body(plan: Plan, advised: Plan | None, facts: Mapping[str, Any]) -> Iterator[str]:
    load, memory = facts["workload"], facts["memory"]
    yield (
        f"<p>{facts['parameters'] / 1e9:.2f} B parameters, weights {_e(facts['weights'])}; "
        f"{load['prompt_tokens']:,} prompt tokens, {load['output_tokens']:,} output tokens; "
        f"{load['concurrency']:,} at once; {_e(facts['technique'])}.</p>"
    )
    yield f"<p class='verdict {KINDS[facts['verdict']]}'>{_e(facts['verdict'].capitalize())}</p>"
    needed = memory["weights_bytes"] + load["concurrency"] * memory["kv_bytes_per_user"]
    yield "<div class=tiles>"
    room = f"of {memory['usable_bytes'] / 1e9:,.1f} GB; room for {memory['users']:,} users"
    yield _tile("Memory", f"{needed / 1e9:,.1f} GB", room, not plan.fits)
    for name, stroke, key in (("TTFT", "prefill", "ttft_ms"), ("ITL", "decode", "itl_ms")):
        limit = "no objective" if load[key] is None else f"objective {load[key]:g} ms"
        bound = f"{limit}; bound by {facts[stroke]['bound']}"
        yield _tile(name, f"{facts[stroke]['ms']:,.1f} ms", bound, name in facts["missed"])
    yield "</div>"
    yield from _advice(facts)
    yield "<h2>Plots</h2><div class=plots>"
    for name, svg, caption in plots(plan, advised):
        yield f"<figure><h3>{_e(name)}</h3>{svg}<figcaption>{_e(caption)}</figcaption></figure>"
    yield "</div>"
    yield from _tables(facts)


def _tile(name: str, value: str, note: str, wrong: bool) -> str:
    kind = " wrong" if wrong else ""
    return f"<div class='tile{kind}'><h3>{_e(name)}</h3><p class=value>{_e(value)}</p><p>{_e(note)}</p></div>"


def _advice(facts: Mapping[str, Any]) -> Iterator[str]:
    if facts["verdict"] == "nothing to do":
        return
    yield "<h2>What to do, in order</h2><ol>"
    for step in facts["advice"]["steps"]:
        before = step["before"]
        yield (
            f"<li>{_e(PROBLEMS[step['problem']])}; {_e(step['bound_by'])} binds. <b>{_e(step['lever'])}</b> "
            f"({_e(step['needs'])}): TTFT {before['ttft_ms']:,.1f} → {step['ttft_ms']:,.1f} ms, ITL "
            f"{before['itl_ms']:,.1f} → {step['itl_ms']:,.1f} ms, room for {before['users']:,} → {step['users']:,} "
            f"users.</li>"
        )
    yield "</ol>"
    for name, key in (("In all", "advice"), ("Without more devices", "advice_without_more_devices")):
        one = facts[key]
        changes = " + ".join(one["changes"]) or "nothing helps"
        left = "nothing left to do" if one["verdict"] == "nothing to do" else f"still: {one['verdict']}"
        yield (
            f"<p>{name}: <b>{_e(changes)}</b>. TTFT {one['ttft_ms']:,.1f} ms, ITL {one['itl_ms']:,.1f} ms, room for "
            f"{one['users']:,} users; {_e(left)}.</p>"
        )


def _tables(facts: Mapping[str, Any]) -> Iterator[str]:
    for name, key in (
        ("Each change alone", "levers"),
        ("Sequences at once", "batches"),
        ("Chunked prefill beside the other sequences", "chunks"),
        ("Tensor parallelism: two all-reduces a layer", "tensor_parallelism"),
    ):
        if facts[key]:
            yield f"<h2>{_e(name)}</h2>{_table(facts[key])}"
    apart, assumed = facts["apart"], facts["assumed"]
    yield (
        f"<h2>Also</h2><ul><li>Prefill and decode on workers of their own: {'yes' if apart['pays'] else 'no'}, "
        f"{_e(apart['why'])}.</li><li>KV from a tier is quicker than computing it above "
        f"{facts['kv_break_even_bytes_per_second'] / 1e9:.2f} GB/s.</li></ul>"
        f"<h2>What it rests on</h2><ul><li>{assumed['compute']:.0%} of the peak rate, {assumed['bandwidth']:.0%} of "
        f"the bandwidth, {assumed['link']:.0%} of the link; no queueing. {_e(assumed['technique'].capitalize())}</li>"
        f"<li>Model: {_e(facts['source'])}</li><li>Machine: {_e(facts['machine_source'])}</li></ul>"
    )


def _table(rows: list[dict[str, Any]]) -> str:
    head = "".join(f"<th>{_e(title(name))}</th>" for name in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{_e(_shown(value))}</td>' for value in row.values())}</tr>" for row in rows)
    return f"<div class=table><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _shown(value: Any) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _e(text: str) -> str:
    return html.escape(text)
