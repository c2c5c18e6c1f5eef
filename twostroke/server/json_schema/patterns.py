"""Regular expressions and formats of strings, in the grammar library's syntax.

A validator searches with the regular expressions of its own language. What is written here accepts a text only if
Python's `re` does, and if ECMA 262 does, which JSON Schema recommends: `.` is no end of a line, `\\d` and `\\w` are
ASCII, `$` is the end of the text.
"""

import functools
import re
import warnings
from typing import Any

MAX_CHARACTERS = 5000
_PART_OF = {"d": "0-9", "D": r"\P{Nd}", "w": "0-9A-Za-z_", "s": r"\t\n\x0b\x0c\r\x20"}  # a part of what each means
_SPACE = r"\p{White_Space}\x1c-\x1f\x{180e}\x{200b}\x{feff}"
_ALL_OF = {"d": r"\p{Nd}", "w": r"\p{L}\p{M}\p{N}_", "s": _SPACE}  # all that each means anywhere
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_SIGN = r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|[^\\]"
_TOKENS = re.compile(
    r"(?P<bar>\|)|(?P<open>\((?:\?:|\?P<\w+>|(?!\?)))|(?P<close>\))|(?P<start>\^|\\A)|(?P<end>\$|\\Z)|(?P<any>\.)"
    r"|(?P<repeat>(?:[*+?]|\{(?=[\d,]*\d)\d*(?:,\d*)?\})[?+]?)"
    r"|(?P<class>\[\^?(?:\\.|[^\]\\])+\])|(?P<special>\(\?|\{,\})"
    rf"|(?P<sign>{_SIGN})",
    re.DOTALL,
)
_MEMBERS = re.compile(rf"(?P<low>{_SIGN})(?:-(?P<high>{_SIGN}))?", re.DOTALL)

_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+\-]{_CLOCK})"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = "(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"
_DAY = f"(?:{_YEAR}-(?:(?:0[13-9]|1[0-2])-[0-3][0-9]|02-(?:[01][0-9]|2[0-8]))|{_LEAP}-02-29)"
_EMAIL = r"^[A-Za-z0-9_+]{1,20}(?:[.\-][A-Za-z0-9_+]{1,20}){0,2}@(?:[A-Za-z][A-Za-z0-9]{0,30}\.){1,2}[A-Za-z]{2,10}$"
# A part of what each format allows: schemas of the grammar library, on which validators agree.
FORMATS: dict[str, dict[str, Any]] = {
    "date": {"format": "date", "pattern": f"^{_DAY}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"format": "date-time", "pattern": f"^{_DAY}T{_TIME}$"},
    "email": {"pattern": _EMAIL},
    "idn-email": {"pattern": _EMAIL},
    **{name: {"format": name} for name in ("duration", "hostname", "ipv4", "ipv6", "uuid", "uri")},
    "iri": {"format": "uri"},
    "uri-reference": {"format": "uri"},
    "iri-reference": {"format": "uri"},
    "json-pointer": {"pattern": "^(?:/(?:[^/~]|~[01])*)*$"},
}
# Formats that validators check, and nothing here covers. Any other name is an annotation.
UNSUPPORTED_FORMATS = {
    "regex",
    "uri-template",
    "relative-json-pointer",
    "idn-hostname",
    "color",
    "ip-address",
    "host-name",
}
# Patterns with lookarounds that zod writes beside a format, and a part of what they allow.
KNOWN = {r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": _EMAIL}


class Untranslatable(Exception):
    """Why a pattern cannot be translated. `foreign`: Python does not know it, though the grammar library may."""

    def __init__(self, why: str, *, foreign: bool = False) -> None:
        super().__init__(why)
        self.foreign = foreign


@functools.lru_cache(256)
def translate(pattern: str) -> str:
    """A regular expression for the grammar library. Where it finds something, Python's `re.search` finds `pattern`.

    Raises Untranslatable, with a reason.
    """
    if len(pattern) > MAX_CHARACTERS:
        raise Untranslatable(f"it has more than {MAX_CHARACTERS} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what Python may read otherwise in the future
            flags = re.compile(pattern).flags
    except (re.error, RecursionError, OverflowError) as error:
        raise Untranslatable(f"it is no regular expression ({error})", foreign=True) from None
    if flags != re.UNICODE.value:
        raise Untranslatable("flags are not supported", foreign=True)
    return _TOKENS.sub(_token, KNOWN.get(pattern, pattern))


def without_anchors(pattern: str) -> str:
    """A pattern for texts that it must match as a whole: anchors at the ends of its alternatives say nothing."""
    alternatives, depth = [""], 0
    for token in _TOKENS.finditer(pattern):
        depth += (token.lastgroup == "open") - (token.lastgroup == "close")
        if token[0] == "|" and depth == 0:
            alternatives.append("")
        else:
            alternatives[-1] += token[0]
    return "|".join(re.sub(r"^(?:\^|\\A)+|(?:(?<!\\)\$|\\Z)+$", "", one) for one in alternatives)


def is_exact(pattern: str) -> bool:
    """Whether the translation certainly finds all that Python finds."""
    return not re.search(r"\\[a-zA-Z]|[.$]", pattern)


def is_endless(pattern: str) -> bool:
    """Whether every beginning of a text in which the pattern is found certainly has endlessly many ends."""
    return not re.search(r"\$|\\Z", pattern) or bool(re.fullmatch(r"[^|$]*(?:[*+]|\{\d*,\})\$", pattern))


def _token(token: re.Match[str]) -> str:
    text = token[0]
    match token.lastgroup:
        case "start" | "end":
            return text.replace(r"\A", "^").replace(r"\Z", "$")
        case "special":
            raise Untranslatable("lookarounds, flags and conditions are not supported")
        case "repeat" if len(text) > 1 and text[-1] == "+":
            raise Untranslatable("possessive repeats are not supported")
        case "repeat":
            return re.sub(r"^\{,", "{0,", text.rstrip("?") or "?")
        case "class":
            return _class(text[1:-1])
        case "any":
            return r"[^\n\r\x{2028}\x{2029}]"
        case "sign":
            if text == "[":
                raise Untranslatable("a class that begins with a bracket is not supported")
            return _class(text) if text[1:] in ("d", "D", "w", "W", "s", "S") else _character(text)
        case "open":
            return "(?:"
        case _:
            return text


def _class(text: str) -> str:
    """A class by what is between its brackets, which may also be a single character."""
    negated = len(text) > 1 and text[0] == "^"
    inside, outside = "", list[str]()
    for member in _MEMBERS.finditer(text[negated:]):
        name, high = member["low"][1:], member["high"]
        if name in _ALL_OF and negated:
            inside += _ALL_OF[name]
        elif name in _PART_OF and not negated:
            inside += _PART_OF[name]
        elif name in ("W", "S") and not negated:
            outside.append(f"[^{_ALL_OF[name.lower()]}]")
        else:
            inside += _character(member["low"]) + (f"-{_character(high)}" if high else "")
    if not inside and not outside:
        raise Untranslatable("a class that begins with a bracket is not supported")
    if negated:
        return f"[^{inside}]"
    options = [*([f"[{inside}]"] if inside else []), *outside]
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"


def _character(sign: str) -> str:
    """A character in the library's syntax."""
    code = ord(_CONTROLS.get(sign[1:], sign[-1]))
    if sign[0] == "\\" and len(sign) > 2:
        code = int(sign[2:], 16)
    elif sign[0] == "\\" and sign[1].isalnum() and sign[1] not in _CONTROLS:
        what = "backreferences are" if sign[1].isdigit() else f"{sign} is"
        raise Untranslatable(f"{what} not supported")
    if 0xD800 <= code < 0xE000:
        raise Untranslatable("half of a surrogate pair is no character")
    return f"\\x{{{code:x}}}"
