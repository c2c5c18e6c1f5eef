"""An explanation on a terminal: short, or with everything."""

import math
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.text import Text

from twostroke.study.explain.attention_maps import PromptAttention
from twostroke.study.explain.cache_comparison import CacheComparison
from twostroke.study.explain.explanation import Explanation
from twostroke.study.explain.observation import DecodeStep, LensLayer, layer_name, settled_after
from twostroke.study.explain.prefill import StoredLayers
from twostroke.study.explain.shown_tokens import Candidate
from twostroke.study.explain.step_work import StepWork
from twostroke.study.explain.terminal_caches import print_caches
from twostroke.study.explain.terminal_text import amount, ms, plural, print_paragraph, quoted, table_of

SHADES = " ·░▒▓█"
FEW_TOKENS, FEW_STEPS, FEW_LAYERS, FEW_CELLS = 24, 8, 6, 32  # of the short form
CELLS_ALL = 64  # of a map with everything
BAR = 24  # columns
SINK = 0.3  # mean weight of the first token from which on it is called a sink


def print_explanation(console: Console, made: Explanation, everything: bool) -> None:
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
        print_caches(console, made.method, everything)


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def _tokens(console: Console, made: Explanation, everything: bool) -> None:
    if everything:
        table = table_of(">index", ">id", "text")
        for token in made.tokens:
            table.add_row(str(token.index), str(token.id), Text(quoted(token.text)))
        console.print(table)
        return
    start, stop = made.turn or (0, len(made.tokens))
    shown = made.tokens[start:stop][:FEW_TOKENS]
    more = f" and {stop - start - len(shown):,} more" if len(shown) < stop - start else ""
    print_paragraph(console, "  ".join(f"{token.id} {quoted(token.text)}" for token in shown) + more)
    if made.turn is not None:
        around = len(made.tokens) - (stop - start)
        print_paragraph(console, f"Your words are {stop - start:,} tokens. The chat template has {around:,} (--all).")
    print_paragraph(console, f"{len(made.tokens):,} tokens of a vocabulary of {made.model.vocabulary:,}")


def _embedding(console: Console, made: Explanation, everything: bool) -> None:
    rows, hidden = made.embedding.shape
    for token, values in list(zip(made.tokens, made.embedding.values, strict=True))[: None if everything else 1]:
        numbers = ", ".join(f"{value:.4g}" for value in values)
        print_paragraph(console, f"{quoted(token.text)} is [{numbers}, ...]")
    print_paragraph(console, f"[{rows:,}, {hidden:,}] numbers: {rows:,} tokens, {hidden:,} each")


def _prefill(console: Console, made: Explanation, everything: bool) -> None:
    prefill = made.prefill
    stored, work = prefill.stored, prefill.work
    table = table_of(f"layer {prefill.layer}", "shape", "axes", "how it is made")
    for shape in prefill.shapes:
        if everything or shape.name in ("Q", "K", "V", "scores", "gated"):
            dims = "[" + ", ".join(f"{size:,}" for size in shape.dims) + "]"
            name = Text(shape.name, style="bold" if shape.stored else "")
            table.add_row(name, dims, ", ".join(shape.axes), shape.made + (": stored" if shape.stored else ""))
    console.print(table)
    n = len(made.tokens)
    print_paragraph(
        console,
        f"Of the {n:,} x {n:,} scores of a head, {prefill.pairs:,} count: no token sees a later one"
        + ("." if made.attention.window is None else f", nor further back than {made.attention.window:,} positions."),
    )
    print_paragraph(
        console,
        f"Stored: K and V of {stored.entries:,} tokens, {' + '.join(map(_kind_text, stored.kinds))} "
        f"numbers of {stored.dtype} = {stored.entry_bytes:,} bytes a token, "
        f"{amount(stored.bytes, 'B')}{' with states' if stored.states else ''} in "
        f"{plural(stored.pages, 'page')} of {stored.page_size}. Q is not stored: no later token needs it.",
    )
    if (states := stored.states) is not None:
        matrix = f"{states.heads} x {states.k_dim} x {states.v_dim}" if states.k_dim else f"{states.inputs:,}"
        rows = f", and rows of the {plural(states.rows, 'token')} since ({states.row_bytes:,} bytes a token)"
        print_paragraph(
            console,
            f"The recurrent layers ({states.layers}) attend to nothing. In place of K and V each has a state of "
            f"{matrix} numbers, kept at every {states.chunk}th position (here {plural(states.snapshots, 'snapshot')} "
            f"of {amount(states.snapshot_bytes, 'B')}){rows if states.row_bytes else ''}.",
        )
    steps = plural(prefill.steps, "step")
    print_paragraph(console, f"{_work_text(work)}. {ms(prefill.seconds)} to the first token, in {steps}.")
    if everything:
        _parts(console, work, _kv_text(made))


def _kind_text(kind: StoredLayers) -> str:
    window = "" if kind.window is None else f" (the last {kind.window:,} tokens)"
    return f"{kind.layers} layers{window} x {1 if kind.one_part else 2} x {kind.kv_heads} heads x {kind.head_dim}"


def _kv_text(made: Explanation) -> str:
    return "K, V and states" if made.model.recurrent else "K and V"


def _work_text(work: StepWork) -> str:
    return (
        f"{amount(work.flops, 'FLOP')} over {amount(work.bytes, 'B')} read: {work.intensity:.1f} FLOPs a byte, "
        f"bound by {work.bound}"
    )


def _parts(console: Console, work: StepWork, kv: str) -> None:
    amounts = (work.weight_bytes, work.kv_bytes, work.linear_flops, work.attention_flops, work.head_flops)
    names = ("weights read", f"{kv} read", "products of layers", "attention", "head")
    table = table_of("work", ">amount", ">predicted")
    for i, (name, count, seconds) in enumerate(zip(names, amounts, work.predicted_s, strict=True)):
        table.add_row(name, amount(count, "B" if i < 2 else "FLOP"), ms(seconds))
    console.print(table)
    print_paragraph(console, "Predicted at prices fitted to a few timed steps of this model on this machine.", "dim")


def _attention_title(attention: PromptAttention) -> str:
    head = "the mean over heads" if attention.head is None else f"head {attention.head}"
    return f"What attends to what: layer {attention.layer}, {head}"


def _attention(console: Console, made: Explanation, everything: bool) -> None:
    attention, most = made.attention, CELLS_ALL if everything else FEW_CELLS
    rows, starts = attention.shown.weights, attention.starts
    join = -(-len(starts) // most)
    label = max(8, min(16, console.width - 2 * -(-len(starts) // join) - 10))
    sink = sum(float(row[0]) for row in rows) / len(rows) > SINK
    scale = max((float(row[1:].max()) for row in rows[1:]), default=1.0) if sink else 1.0
    marks = "".join(f"{starts[column]:<8}" for column in range(0, len(starts), 4 * join))
    console.print(Text(" " * (label + 8) + marks, style="dim"), no_wrap=True, overflow="crop")
    for first in range(0, len(starts), join):
        some = rows[first : first + join]
        cells = [
            sum(float(row[column : column + join].sum()) for row in some) / len(some)
            for column in range(0, first + len(some), join)
        ]
        text = quoted(made.tokens[starts[first]].text)
        line = Text(f"{starts[first]:>6} {text[:label]:<{label}} ")
        for weight in cells:
            shade = SHADES[min(len(SHADES) - 1, math.ceil(math.sqrt(weight / scale) * (len(SHADES) - 1) - 0.3))]
            line.append(shade * 2, style="cyan")
        console.print(line, no_wrap=True, overflow="crop")
    each = join * (starts[1] if len(starts) > 1 else 1)
    cell = "" if each == 1 else f" A cell is {each:,} x {each:,} tokens."
    print_paragraph(console, f"Each row's sum is 1; columns are the same tokens, from the left.{cell}", "dim")
    share, first = sum(float(row[0]) for row in rows) / len(rows), starts[1] if len(starts) > 1 else 1
    if sink:
        tokens = "the first token: an" if first == 1 else f"the first {first} tokens, with the"
        text = f"{share:.0%} goes to {tokens} attention sink, where heads look that find nothing else."
        print_paragraph(console, f"{text} Shades are relative to the largest weight besides, {scale:.2f}.", "dim")
    if len(starts) == len(made.tokens):
        last = [(int(i), float(rows[-1][i])) for i in np.argsort(-rows[-1], kind="stable")]
        print_paragraph(console, f"The last token attends most to {_attended(made, last)}.")
    layers = "attention layers" if made.model.recurrent else "layers"
    most = _attended(made, made.prefill.attends)
    print_paragraph(console, f"Over all {layers} and heads, it attends most to {most}.")


def _attended(made: Explanation, attends: Sequence[tuple[int, float]], count: int = 3) -> str:
    """The entries with the largest weights; without the first one where it is the sink."""
    texts, sink = _all_texts(made), len(attends) > 1 and attends[0][0] == 0
    shown = attends[1:] if sink else attends
    found = ", ".join(f"{quoted(texts[i])} {weight:.2f}" for i, weight in shown[:count])
    return f"{found} (sink {attends[0][1]:.2f})" if sink else found


def _all_texts(made: Explanation) -> list[str]:
    return [token.text for token in made.tokens] + [step.token_in.text for step in made.decode]


def _candidates(console: Console, found: Sequence[Candidate], token: Candidate) -> None:
    table = table_of("candidate", ">id", ">probability", "")
    for one in found if token.id in [one.id for one in found] else [*found, token]:
        style = "bold" if one.id == token.id else ""
        bar = "█" * round(BAR * one.probability)
        table.add_row(Text(quoted(one.text), style=style), str(one.id), f"{one.probability:.4f}", Text(bar, "cyan"))
    console.print(table)


def _lens(console: Console, layers: Sequence[LensLayer], everything: bool) -> None:
    table = table_of("after", "likeliest", ">probability", ">rank of the answer", ">its probability")
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
    print_paragraph(
        console, "The head applied to each layer's hidden state (logit lens): a direction, not yet an answer.", "dim"
    )


def _decode(console: Console, made: Explanation, everything: bool) -> None:
    steps = made.decode if everything else made.decode[:FEW_STEPS]
    if not steps:
        print_paragraph(console, "No step: the first token, which prefill gave, is the whole answer.")
        return
    table = table_of("token in", "token out", ">probability", "attends most to", ">entries", ">read", ">time")
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
        print_paragraph(console, f"and {len(made.decode) - len(steps):,} more steps (--all)", "dim")
    if everything:
        _all_candidates(console, steps)
    last = made.decode[-1]
    print_paragraph(
        console,
        f"The last step: {_work_text(last.work)}; {_kv_text(made)} are {amount(last.work.kv_bytes, 'B')} of it.",
    )
    alike = "made the same tokens" if made.timed_alike else "made OTHER tokens: its backend is not exact"
    print_paragraph(console, f"Times are of a plain request that nobody watched; it {alike}.", "dim")
    print_paragraph(console, f"The answer: {quoted(made.text)} ({made.finish_reason or 'no room for more'})")


def _all_candidates(console: Console, steps: Sequence[DecodeStep]) -> None:
    table = table_of(">entry", "candidates", ">settled after")
    for step in steps:
        texts = "  ".join(f"{quoted(one.text)} {one.probability:.3f}" for one in step.candidates)
        settled = settled_after(step.lens)
        table.add_row(str(step.token_in.index), Text(texts), "-" if settled is None else layer_name(settled))
    console.print(table)


def _both_ways(console: Console, made: CacheComparison, everything: bool) -> None:
    table = table_of("", ">K and V computed", ">formula", ">ms of each step")
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
    print_paragraph(
        console, f"{p:,} prompt tokens and {g} generated: {made.ratio:.1f} times as much. {same}; K and V are {bits}."
    )
    print_paragraph(
        console,
        "Formulas: g p + g (g - 1) / 2 without, p + g - 1 with it. The usual estimate, (g p + g^2 / 2) / (p + g), says "
        f"{made.usual_ratio:.1f} times.",
        "dim",
    )
