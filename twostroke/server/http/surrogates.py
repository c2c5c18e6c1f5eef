"""Half of a surrogate pair in a body: JSON can write it, but it is no character, and UTF-8 has no bytes for it."""

import re

from twostroke.server.errors import ApiError

_SUSPECT = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
# All that is fine: text, pairs, and other escapes. A few thousand at a time, since a match remembers each; and nothing
# follows, so none is tried again. No possessive quantifiers: Python 3.11.2, which is Debian's, takes them wrongly here.
_WELL_FORMED = re.compile(
    rb"(?:[^\\\xed]+|\xed(?![\xa0-\xbf])"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\(?!u[dD][89a-fA-F]).){1,4096}",
    re.DOTALL,
)


def refuse_lone_surrogates(body: bytes) -> None:
    """Raise ApiError if a JSON body in UTF-8 has half of a surrogate pair: nothing could be sent back with it."""
    if _SUSPECT.search(body) is None:
        return
    end = 0
    while (some := _WELL_FORMED.match(body, end)) is not None:
        end = some.end()
    if _SUSPECT.match(body, end):
        raise ApiError(400, f"the body has half of a surrogate pair, which is no character, at byte {end}")
