"""A technique's caches on a terminal: a bar by position for each stroke."""

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from twostroke.study.explain.cache_map import CacheMap, CacheStroke, EntryRange
from twostroke.study.explain.terminal_text import print_paragraph, quoted

STROKES = 6  # in the short form
OWNERS = {"main": ("█", "cyan"), "student": ("▒", "yellow"), "draft": ("░", "magenta")}


def print_caches(console: Console, made: CacheMap, everything: bool) -> None:
    """Print a technique's caches, a bar for each stroke."""
    strokes = made.strokes if everything else made.strokes[:STROKES]
    width = max([one.stop for stroke in strokes for one in (*stroke.given, *stroke.made, *stroke.dropped)], default=1)
    scale = max(1, -(-width // max(16, console.width - 36)))
    for stroke in strokes:
        line = Text(f"{stroke.stroke:<8}{stroke.model:<9}")
        line.append_text(_bar(stroke, width, scale))
        console.print(line, no_wrap=True, overflow="crop")
        print_paragraph(console, f"                 {_stroke_text(stroke)}", "dim")
    if len(strokes) < len(made.strokes):
        print_paragraph(console, f"and {len(made.strokes) - len(strokes):,} more strokes (--all)", "dim")
    shown = "  ".join(f"{mark} {owner}'s" for owner, (mark, _) in OWNERS.items() if _has(made, owner))
    each = "" if scale == 1 else f"; a column is {scale} positions"
    print_paragraph(console, f"Entries by position: {shown}  ┄ dropped{each}", "dim")
    facts = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in made.facts.items())
    print_paragraph(
        console, f"At the end {made.entries:,} entries; the plain request has {made.plain_entries:,}. {facts}".strip()
    )
    print_paragraph(console, f"The answer: {quoted(made.text)}")


def _has(made: CacheMap, owner: str) -> bool:
    return any(one.owner == owner for stroke in made.strokes for one in (*stroke.given, *stroke.made))


def _bar(stroke: CacheStroke, width: int, scale: int) -> Text:
    cells = [(" ", "")] * -(-width // scale)

    def paint(entries: Iterable[EntryRange], mark: str | None, style: str, bold: bool) -> None:
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
