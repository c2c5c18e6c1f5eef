"""An explanation on a terminal: short, or with everything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from twostroke.explain.both_ways import BothWays
from twostroke.explain.cache_map import CacheMap, CacheStroke, Entries
from twostroke.explain.decode import Step
from twostroke.explain.explanation import Explanation
from twostroke.explain.heat import Attention
from twostroke.explain.lens import LensLayer, layer_name, settled_after
from twostroke.explain.tokens import Candidate
from twostroke.explain.work import StepWork

SHADES = " ·░▒▓█"
FEW_TOKENS, FEW_STEPS, FEW_LAYERS, FEW_CELLS = 24, 8, 6, 32  # of the short form
STROKES = 6  # of a technique, in the short form
CELLS_ALL = 64  # of a map with everything
BAR = 24  # columns
OWNERS = {"main": ("█", "cyan"), "student": ("▒", "yellow"), "draft": ("░", "magenta")}


def show(console: Console, made: Explanation, everything: bool) -> None:
    """Print an explanation. Texts of tokens are shown as they are quoted in Python: nothing in them acts."""
    _heading(console, "The prompt becomes tokens")
    _tokens(console, made, everything)
    _heading(console, "Each token becomes a row of numbers: the embedding")
    _embedding(console, made, everything)
    _heading(console, "Prefill: all tokens at once, through every layer")
    _prefill(console, made, everything)
    _heading(console, _attention_title(made.attention))
    _attention(console, made, everything)
    _heading(console, "The first token, and how it forms layer by layer")
    _candidates(console, made.prefill.candidates, made.prefill.token)
    _lens(console, made.lens, everything)
    _heading(console, "Decode: one token a step, which reads the cache")
    _decode(console, made, everything)
    if made.both_ways is not None:
        _heading(console, "The same answer without the cache")
        _both_ways(console, made.both_ways, everything)
    if made.method is not None:
        _heading(console, f"What {made.method.method} does to the cache")
        _method(console, made.method, everything)


def quoted(text: str) -> str:
    """As Python writes it: what cannot be printed, or would move the cursor, is escaped."""
    return repr(text)


def amount(count: float, unit: str) -> str:
    """A count with a prefix of 1,000s: 2.82 GFLOP, 96.7 MB."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {prefix}{unit}"
    return f"{count:.3g} {unit}"


def plural(count: int, name: str) -> str:
    """1 page, 2 pages."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def ms(seconds: float | None) -> str:
    """Milliseconds; a dash where nothing was timed."""
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style))


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    return table


def _tokens(console: Console, made: Explanation, everything: bool) -> None:
    if everything:
        table = _table(">index", ">id", "text")
        for token in made.tokens:
            table.add_row(str(token.index), str(token.id), Text(quoted(token.text)))
        console.print(table)
        return
    shown = made.tokens[:FEW_TOKENS]
    more = f" and {len(made.tokens) - len(shown):,} more" if len(shown) < len(made.tokens) else ""
    _say(console, "  ".join(f"{token.id} {quoted(token.text)}" for token in shown) + more)
    _say(console, f"{len(made.tokens):,} tokens of a vocabulary of {made.model.vocabulary:,}")


def _embedding(console: Console, made: Explanation, everything: bool) -> None:
    rows, hidden = made.embedding.shape
    for token, values in list(zip(made.tokens, made.embedding.values, strict=True))[: None if everything else 1]:
        numbers = ", ".join(f"{value:.4g}" for value in values)
        _say(console, f"{quoted(token.text)} is [{numbers}, ...]")
    _say(console, f"[{rows:,}, {hidden:,}] numbers: {rows:,} tokens, {hidden:,} each")


def _prefill(console: Console, made: Explanation, everything: bool) -> None:
    prefill = made.prefill
    stored, work = prefill.stored, prefill.work
    table = _table(f"layer {prefill.layer}", "shape", "axes", "how it is made")
    for shape in prefill.shapes:
        if everything or shape.name in ("Q", "K", "V", "scores", "gated"):
            dims = "[" + ", ".join(f"{size:,}" for size in shape.dims) + "]"
            name = Text(shape.name, style="bold" if shape.stored else "")
            table.add_row(name, dims, ", ".join(shape.axes), shape.made + (": stored" if shape.stored else ""))
    console.print(table)
    n = len(made.tokens)
    _say(
        console,
        f"Of the {n:,} x {n:,} scores of a head, {prefill.pairs:,} count: no token sees a later one"
        + ("." if made.attention.window is None else f", nor further back than {made.attention.window:,} positions."),
    )
    _say(
        console,
        f"Stored: K and V of {stored.entries:,} tokens, {stored.layers} layers x 2 x {stored.kv_heads} heads x "
        f"{stored.head_dim} numbers of {stored.dtype} = {stored.entry_bytes:,} bytes a token, "
        f"{amount(stored.bytes, 'B')} in {plural(stored.pages, 'page')} of {stored.page_size}. Q is not stored: no "
        "later token needs it.",
    )
    steps = plural(prefill.steps, "step")
    _say(console, f"{_work_text(work)}. {ms(prefill.seconds)} to the first token, in {steps}.")
    if everything:
        _parts(console, work)


def _work_text(work: StepWork) -> str:
    return (
        f"{amount(work.flops, 'FLOP')} over {amount(work.bytes, 'B')} read: {work.intensity:.1f} FLOPs a byte, "
        f"bound by {work.bound}"
    )


def _parts(console: Console, work: StepWork) -> None:
    amounts = (work.weight_bytes, work.kv_bytes, work.linear_flops, work.attention_flops, work.head_flops)
    names = ("weights read", "K and V read", "products of layers", "attention", "head")
    table = _table("work", ">amount", ">predicted")
    for i, (name, count, seconds) in enumerate(zip(names, amounts, work.predicted_s, strict=True)):
        table.add_row(name, amount(count, "B" if i < 2 else "FLOP"), ms(seconds))
    console.print(table)
    _say(console, "Predicted at prices fitted to a few timed steps of this model on this machine.", "dim")


def _attention_title(attention: Attention) -> str:
    head = "the mean over heads" if attention.head is None else f"head {attention.head}"
    return f"What attends to what: layer {attention.layer}, {head}"


def _attention(console: Console, made: Explanation, everything: bool) -> None:
    attention, most = made.attention, CELLS_ALL if everything else FEW_CELLS
    rows, starts = attention.shown.weights, attention.starts
    join = -(-len(starts) // most)
    label = max(8, min(16, console.width - 2 * -(-len(starts) // join) - 10))
    for first in range(0, len(starts), join):
        some = rows[first : first + join]
        cells = [
            sum(float(row[column : column + join].sum()) for row in some) / len(some)
            for column in range(0, first + len(some), join)
        ]
        text = quoted(made.tokens[starts[first]].text)
        line = Text(f"{starts[first]:>6} {text[:label]:<{label}} ")
        for weight in cells:
            shade = SHADES[min(len(SHADES) - 1, math.ceil(math.sqrt(weight) * (len(SHADES) - 1) - 0.3))]
            line.append(shade * 2, style="cyan")
        console.print(line, no_wrap=True, overflow="crop")
    each = join * (starts[1] if len(starts) > 1 else 1)
    cell = "" if each == 1 else f" A cell is {each:,} x {each:,} tokens."
    _say(console, f"Each row's sum is 1; columns are the same tokens, from the left.{cell}", "dim")
    share, first = sum(float(row[0]) for row in rows) / len(rows), starts[1] if len(starts) > 1 else 1
    if share > 0.3:
        tokens = "the first token: an" if first == 1 else f"the first {first} tokens, with the"
        _say(console, f"{share:.0%} goes to {tokens} attention sink, where heads look that find nothing else.", "dim")
    if len(starts) == len(made.tokens):
        last = [(int(i), float(rows[-1][i])) for i in np.argsort(-rows[-1], kind="stable")]
        _say(console, f"The last token attends most to {_attended(made, last)}.")
    _say(console, f"Over all layers and heads, it attends most to {_attended(made, made.prefill.attends)}.")


def _attended(made: Explanation, attends: Iterable[tuple[int, float]], count: int = 3) -> str:
    texts = _all_texts(made)
    return ", ".join(f"{quoted(texts[i])} {weight:.2f}" for i, weight in list(attends)[:count])


def _all_texts(made: Explanation) -> list[str]:
    return [token.text for token in made.tokens] + [step.token_in.text for step in made.decode]


def _candidates(console: Console, found: Sequence[Candidate], token: Candidate) -> None:
    table = _table("candidate", ">id", ">probability", "")
    for one in found if token.id in [one.id for one in found] else [*found, token]:
        style = "bold" if one.id == token.id else ""
        bar = "█" * round(BAR * one.probability)
        table.add_row(Text(quoted(one.text), style=style), str(one.id), f"{one.probability:.4f}", Text(bar, "cyan"))
    console.print(table)


def _lens(console: Console, layers: Sequence[LensLayer], everything: bool) -> None:
    table = _table("after", "likeliest", ">probability", ">rank of the answer", ">its probability")
    if everything:
        chosen = list(layers)
    else:
        places = {round(i * (len(layers) - 1) / (FEW_LAYERS - 1)) for i in range(FEW_LAYERS)}
        settled = settled_after(layers)
        chosen = [layers[i] for i in sorted(places | ({settled} if settled is not None else set()))]
    for one in chosen:
        first, own = one.candidates[0], f"{one.probability:.2g}"
        table.add_row(layer_name(one.layer), Text(quoted(first.text)), f"{first.probability:.4f}", f"{one.rank:,}", own)
    console.print(table)
    _say(console, "The head applied to each layer's hidden state (logit lens): a direction, not yet an answer.", "dim")


def _decode(console: Console, made: Explanation, everything: bool) -> None:
    steps = made.decode if everything else made.decode[:FEW_STEPS]
    if not steps:
        _say(console, "No step: the first token, which prefill gave, is the whole answer.")
        return
    table = _table("token in", "token out", ">probability", "attends most to", ">entries", ">read", ">time")
    for step in steps:
        table.add_row(
            Text(quoted(step.token_in.text)),
            Text(quoted(step.token_out.text)),
            f"{step.token_out.probability:.3f}",
            Text(_attended(made, step.attends, 3 if everything else 2), no_wrap=True, overflow="ellipsis"),
            f"{step.before.entries:,} → {step.after.entries:,}",
            amount(step.work.bytes, "B"),
            ms(step.seconds),
        )
    console.print(table)
    if len(steps) < len(made.decode):
        _say(console, f"and {len(made.decode) - len(steps):,} more steps (--all)", "dim")
    if everything:
        _all_candidates(console, steps)
    last = made.decode[-1]
    _say(console, f"The last step: {_work_text(last.work)}; K and V are {amount(last.work.kv_bytes, 'B')} of it.")
    alike = "made the same tokens" if made.timed_alike else "made OTHER tokens: its backend is not exact"
    _say(console, f"Times are of a plain request that nobody watched; it {alike}.", "dim")
    _say(console, f"The answer: {quoted(made.text)} ({made.finish_reason or 'no room for more'})")


def _all_candidates(console: Console, steps: Sequence[Step]) -> None:
    table = _table(">entry", "candidates", ">settled after")
    for step in steps:
        texts = "  ".join(f"{quoted(one.text)} {one.probability:.3f}" for one in step.candidates)
        settled = settled_after(step.lens)
        table.add_row(str(step.token_in.index), Text(texts), "-" if settled is None else layer_name(settled))
    console.print(table)


def _both_ways(console: Console, made: BothWays, everything: bool) -> None:
    table = _table("", ">K and V computed", ">formula", ">ms of each step")
    for name, way, formula in (
        ("without", made.naive, made.naive_formula),
        ("with the cache", made.cached, made.cached_formula),
    ):
        times = way.seconds if everything else way.seconds[:8]
        text = " ".join(f"{seconds * 1e3:.1f}" for seconds in times)
        table.add_row(name, f"{way.computed:,} tokens", f"{formula:,}", text)
    console.print(table)
    p, g = made.prompt, made.steps
    same = "The same tokens" if made.same_tokens else "OTHER tokens"
    bits = "the same bits" if made.largest_difference == 0 else f"equal up to {made.largest_difference:.2g}"
    _say(console, f"{p:,} prompt tokens and {g} generated: {made.ratio:.1f} times as much. {same}; K and V are {bits}.")
    _say(
        console,
        "Formulas: g p + g (g - 1) / 2 without, p + g - 1 with it. The usual estimate, (g p + g^2 / 2) / (p + g), says "
        f"{made.usual_ratio:.1f} times.",
        "dim",
    )


def _method(console: Console, made: CacheMap, everything: bool) -> None:
    strokes = made.strokes if everything else made.strokes[:STROKES]
    width = max([one.stop for stroke in strokes for one in (*stroke.given, *stroke.made, *stroke.dropped)], default=1)
    scale = max(1, -(-width // max(16, console.width - 36)))
    for stroke in strokes:
        line = Text(f"{stroke.stroke:<8}{stroke.model:<9}")
        line.append_text(_bar(stroke, width, scale))
        console.print(line, no_wrap=True, overflow="crop")
        _say(console, f"                 {_stroke_text(stroke)}", "dim")
    if len(strokes) < len(made.strokes):
        _say(console, f"and {len(made.strokes) - len(strokes):,} more strokes (--all)", "dim")
    shown = "  ".join(f"{mark} {owner}'s" for owner, (mark, _) in OWNERS.items() if _has(made, owner))
    each = "" if scale == 1 else f"; a column is {scale} positions"
    _say(console, f"Entries by position: {shown}  ┄ dropped{each}", "dim")
    facts = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in made.facts.items())
    _say(console, f"At the end {made.entries:,} entries; the plain request has {made.plain_entries:,}. {facts}".strip())
    _say(console, f"The answer: {quoted(made.text)}")


def _has(made: CacheMap, owner: str) -> bool:
    return any(one.owner == owner for stroke in made.strokes for one in (*stroke.given, *stroke.made))


def _bar(stroke: CacheStroke, width: int, scale: int) -> Text:
    cells = [(" ", "")] * -(-width // scale)

    def paint(entries: Iterable[Entries], mark: str | None, style: str, bold: bool) -> None:
        for one in entries:
            own, colour = OWNERS.get(one.owner, ("█", "cyan"))
            for position in range(one.start, one.stop):
                cells[position // scale] = mark or own, style or (f"bold {colour}" if bold else colour)

    paint(stroke.dropped, "┄", "dim", bold=False)
    paint(stroke.given, None, "", bold=False)
    paint(stroke.made, None, "", bold=True)
    line = Text()
    for mark, style in cells:
        line.append(mark, style=style or None)
    return line


def _stroke_text(stroke: CacheStroke) -> str:
    count = sum(len(one) for one in stroke.given)
    parts = [f"given {count:,}"] if count else []
    if dropped := sum(len(one) for one in stroke.dropped):
        parts.append(f"dropped {dropped:,}")
    parts.append(f"made {sum(len(one) for one in stroke.made):,}")
    if stroke.guesses:
        guesses = " ".join(f"{quoted(one.token.text)}{'+' if one.kept else '-'}" for one in stroke.guesses)
        parts.append(f"guesses {guesses}")
    elif stroke.stroke == "decode":
        parts.append(quoted("".join(token.text for token in stroke.tokens))[:60])
    return ", ".join(parts)
