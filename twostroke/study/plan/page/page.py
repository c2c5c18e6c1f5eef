"""The page: the answer, what to do, the load, plots, every change alone, and what it rests on. Nothing is fetched."""

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from twostroke.errors import InvalidRequest
from twostroke.study.plan.account import title
from twostroke.study.plan.advice import PROBLEMS
from twostroke.study.plan.load_advice import LoadAdvice
from twostroke.study.plan.load_words import bindings, decisions, figure, lines, offered, remains
from twostroke.study.plan.page.load_plots import load_plots
from twostroke.study.plan.page.plots import plots
from twostroke.study.plan.plan import Plan

KINDS = {"nothing to do": "good", "misses the objective": "warn", "does not fit": "bad", "cannot be served": "bad"}


def write_page(
    path: Path, plan: Plan, advised: Plan | None, facts: Mapping[str, Any], load: LoadAdvice | None = None
) -> None:
    """Write the page of a plan and its account, as `render`. Raises InvalidRequest if the file cannot be written."""
    try:
        path.write_text(render(plan, advised, facts, load))
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}") from None


def render(plan: Plan, advised: Plan | None, facts: Mapping[str, Any], load: LoadAdvice | None = None) -> str:
    """The page's text. `advised` is the plan with all advice, None where there is none; `load` is that of the facts."""
    here = files("twostroke.study.plan.page")
    name = f"{facts['model']} on {facts['devices']} x {facts['machine']}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_e(name)}</title><style>{here.joinpath('page.css').read_text()}</style></head><body>"
        f"<header><h1>{_e(name)}</h1><button id=theme>light / dark</button></header>"
        f"{''.join(_body(plan, advised, facts, load))}"
        f"<div id=told hidden></div><script>{here.joinpath('page.js').read_text()}</script></body></html>\n"
    )


def _body(plan: Plan, advised: Plan | None, facts: Mapping[str, Any], under: LoadAdvice | None) -> Iterator[str]:
    load, memory = facts["workload"], facts["memory"]
    yield (
        f"<p>{facts['parameters'] / 1e9:.2f} B parameters, weights {_e(facts['weights'])}; "
        f"{load['prompt_tokens']:,} prompt tokens, {load['output_tokens']:,} output tokens; "
        f"{load['concurrency']:,} at once; {_e(facts['technique'])}.</p>"
    )
    yield _verdict(facts)
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
    if under is not None:
        yield from _load(facts["load"], under)
    yield f"<h2>Plots</h2>{_figures(plots(plan, advised))}"
    yield from _tables(facts)


def _verdict(facts: Mapping[str, Any]) -> str:
    """Of a request alone, and of the load if there is one; in the colour of the worse."""
    verdicts, text = [facts["verdict"]], facts["verdict"].capitalize()
    if "load" in facts:
        verdicts.append(facts["load"]["verdict"])
        text += f"; under the load: {verdicts[-1]}"
    kinds = [KINDS[one] for one in verdicts]
    kind = next(one for one in ("bad", "warn", "good") if one in kinds)
    return f"<p class='verdict {kind}'>{_e(text)}</p>"


def _load(facts: dict[str, Any], advised: LoadAdvice) -> Iterator[str]:
    """What comes, the answer, what binds, what to do, plots, every change alone, and commands."""
    load = advised.asked
    yield f"<h2>Under the load</h2><p>{_e(offered(facts))}.</p>"
    yield f"<p class='verdict {KINDS[facts['verdict']]}'>{_e(facts['verdict'].capitalize())}</p><div class=tiles>"
    limits = {"TTFT": load.objectives.ttft_s, "ITL": load.objectives.itl_s}
    for name, limit in limits.items():
        value = f"{1e3 * sum(load.parts[name]):,.1f} ms" if load.parts else "without end"
        note = "no objective" if limit is None else f"objective {1e3 * limit:g} ms"
        note += f"; bound by {facts['binds'][name]}" if load.parts else ""
        yield _tile(f"{name}, {figure(facts)}", value, note, name in facts["missed"] or not load.parts)
    within = facts["most_within_objectives"]
    note = "no objective" if within is None else f"{within:,.3g} within the objectives"
    yield _tile("Highest rate", f"{facts['most_requests_per_second']:,.3g} requests/s", note, not load.parts)
    yield f"</div>{_list([*bindings(facts), *lines(facts)])}"
    if facts["verdict"] != "nothing to do":
        steps = "".join(f"<li><b>{_e(change)}</b><br>{_e(brings)}</li>" for change, brings in decisions(facts))
        yield f"<h2>What to do under the load, in order</h2><ol>{steps}</ol>{_list(remains(facts))}"
    yield _figures(load_plots(load, advised.load if advised.steps else None))
    if facts["levers"]:
        yield f"<h2>Each change alone, under the load</h2>{_table(facts['levers'])}"
    for name, command in facts.get("commands", {}).items():
        yield f"<p>{_e(name.capitalize())}:</p><pre>{_e(command)}</pre>"


def _figures(made: Iterable[tuple[str, str, str]]) -> str:
    """Plots with their titles and captions."""
    each = (
        f"<figure><h3>{_e(name)}</h3>{svg}<figcaption>{_e(caption)}</figcaption></figure>"
        for name, svg, caption in made
    )
    return f"<div class=plots>{''.join(each)}</div>"


def _list(texts: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_e(text)}</li>' for text in texts)}</ul>" if texts else ""


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
    queueing = "queueing under the load alone" if "load" in facts else "no queueing"
    yield (
        f"<h2>Also</h2><ul><li>Prefill and decode on workers of their own: {'yes' if apart['pays'] else 'no'}, "
        f"{_e(apart['why'])}.</li><li>KV from a tier is quicker than computing it above "
        f"{facts['kv_break_even_bytes_per_second'] / 1e9:.2f} GB/s.</li></ul>"
        f"<h2>What it rests on</h2><ul><li>{assumed['compute']:.0%} of the peak rate, {assumed['bandwidth']:.0%} of "
        f"the bandwidth, {assumed['link']:.0%} of the link; {queueing}. {_e(assumed['technique'].capitalize())}</li>"
        f"<li>Model: {_e(facts['source'])}</li><li>Machine: {_e(facts['machine_source'])}</li></ul>"
    )


def _table(rows: list[dict[str, Any]]) -> str:
    head = "".join(f"<th>{_e(title(name))}</th>" for name in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{_e(_shown(value))}</td>' for value in row.values())}</tr>" for row in rows)
    return f"<div class=table><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _e(text: str) -> str:
    return html.escape(text)
