"""The passages of a prompt: texts parted by blank lines, of which techniques drop some, or read each alone."""

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from twostroke.methods.method import Prompt


def passages_of(prompt: Prompt, last: int) -> list[range]:
    """The passages of users' and earlier assistants' messages, in order, without the question.

    `last`: how many passages at the end of the last user's text are the question. System messages, the chat template,
    and an assistant's message behind the last user's are in none.
    """
    contents = prompt.contents
    asked = max((i for i, (role, _) in enumerate(contents) if role == "user"), default=-1)
    found: list[range] = []
    for index, (role, part) in enumerate(contents):
        if role in ("system", "developer") or (role == "assistant" and index > asked):
            continue
        inside = parted(part, prompt.pieces(part))
        found += inside[: max(0, len(inside) - last)] if index == asked else inside
    return found


def parted(part: range, pieces: Sequence[bytes]) -> list[range]:
    """A text cut behind its blank lines, or behind its lines if it has none; `pieces` are its tokens' bytes."""
    data, ends = b"".join(pieces), np.cumsum([len(piece) for piece in pieces])
    cuts = [m.end() for m in re.finditer(rb"\n\s*\n", data)] or [m.end() for m in re.finditer(rb"\n", data)]
    behind = (np.searchsorted(ends, cuts) + 1).tolist() if cuts else []
    places = sorted({0, len(part), *(min(one, len(part)) for one in behind)})
    return [part[start:stop] for start, stop in pairwise(places)]
