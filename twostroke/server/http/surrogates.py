"""Half of a surrogate pair in a body: JSON can write it, but it is no character, and UTF-8 has no bytes for it."""

import re

from twostroke.server.errors import ApiError

_SUSPECT = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
# All that is fine: text, pairs, and other escapes. Possessive, so it takes time that is linear in the body's length.
_WELL_FORMED = re.compile(
    rb"(?:[^\\\xed]++|\xed(?![\xa0-\xbf])"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\(?!u[dD][89a-fA-F]).)*+",
    re.DOTALL,
)


def refuse_lone_surrogates(body: bytes) -> None:
    """Raise ApiError if a JSON body in UTF-8 has half of a surrogate pair: nothing could be sent back with it."""
    if _SUSPECT.search(body) is None:
        return
    end = _WELL_FORMED.match(body).end()  # pyright: ignore[reportOptionalMemberAccess]
    if _SUSPECT.match(body, end):
        raise ApiError(400, f"the body has half of a surrogate pair, which is no character, at byte {end}")
