"""Python's regular expressions in the syntax of the grammar library.

A validator searches with its own language's regular expressions; here that is Python's, whose own parser reads the
pattern. What is written accepts a text only if Python does, and if ECMA 262 (which JSON Schema recommends) does, too:
`.` is no end of a line, `\\d` and `\\w` are ASCII, `$` is the end of the text.
"""

import functools
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from re import _constants as constants  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
from re import _parser as parser  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
from typing import Any

import llguidance

MOST_CHARACTERS, MOST_REPEATS, MOST_BRANCHES = 5000, 20_000, 64
MOST_REPEATED = 50  # times that a group may repeat which repeats something itself
_INSIDE = {  # of a class: a part of what each means in Python and in ECMA 262
    "CATEGORY_DIGIT": "0-9",
    "CATEGORY_NOT_DIGIT": r"\P{Nd}",
    "CATEGORY_WORD": "0-9A-Za-z_",
    "CATEGORY_SPACE": r"\t\n\x0b\x0c\r\x20",
}
_ALONE = {
    "CATEGORY_NOT_WORD": r"[^\p{L}\p{M}\p{N}_]",
    "CATEGORY_NOT_SPACE": r"[^\p{White_Space}\x1c-\x1f\x{180e}\x{200b}\x{feff}]",
}
_EXCLUDED = {  # from a class: all that each means in either
    "CATEGORY_DIGIT": r"\p{Nd}",
    "CATEGORY_WORD": r"\p{L}\p{M}\p{N}_",
    "CATEGORY_SPACE": r"\p{White_Space}\x1c-\x1f\x{180e}\x{200b}\x{feff}",
}


class Untranslatable(Exception):
    """A pattern that Python does not know, or whose meaning the grammar library cannot express."""


@dataclass(frozen=True)
class Pattern:
    """A pattern that was translated."""

    regex: str  # of the whole text
    exact: bool  # accepts all that Python accepts
    endless: bool  # every beginning of a text that it accepts has endlessly many ends

    def matches(self, text: str) -> bool:
        """Whether a text matches, in time that is linear in its length."""
        matcher = llguidance.LLMatcher(_bytes(), llguidance.LLMatcher.grammar_from_regex(self.regex), log_level=0)
        read = list(text.encode("utf-8", "surrogatepass"))
        return matcher.try_consume_tokens(read) == len(read) and matcher.is_accepting()


@functools.cache
def _bytes() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")


@functools.lru_cache(256)
def translate(pattern: str) -> Pattern:
    """The pattern of texts in which Python's `re.search` finds `pattern`.

    Raises:
        Untranslatable: with a reason.
    """
    if len(pattern) > MOST_CHARACTERS:
        raise Untranslatable(f"it has more than {MOST_CHARACTERS} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what Python may read otherwise in the future
            parsed = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise Untranslatable(f"it is no regular expression ({error})") from None
    if parsed.state.flags != re.UNICODE.value:
        raise Untranslatable("flags are not supported")
    writer = _Writer()
    branches = [writer.whole(branch) for branch in _branches(list(parsed))]
    regex = "|".join(f"(?:{text})" for text, _ in branches)
    return Pattern(f"(?:{regex})", writer.exact, all(endless for _, endless in branches))


def _has_anchor(items: Sequence[Any]) -> bool:
    def within(value: Any) -> bool:
        if isinstance(value, parser.SubPattern | list | tuple):
            return any(within(one) for one in value)
        return value is constants.AT

    return within(list(items))


def _branches(items: list[Any]) -> list[list[Any]]:
    """Alternatives in which anchors are at the top."""
    for place, (op, value) in enumerate(items):
        inner: list[list[Any]] | None = None
        if op is constants.SUBPATTERN and _has_anchor(value[3]) and not value[1] and not value[2]:
            inner = [list(value[3])]
        elif op is constants.BRANCH and _has_anchor(value[1]):
            inner = [list(branch) for branch in value[1]]
        if inner is not None:
            found = [branch for one in inner for branch in _branches([*items[:place], *one, *items[place + 1 :]])]
            if len(found) > MOST_BRANCHES:
                raise Untranslatable("it has too many anchored alternatives")
            return found
    return [items]


class _Writer:
    def __init__(self) -> None:
        self.exact = True
        self._repeats = 1

    def whole(self, items: list[Any]) -> tuple[str, bool]:
        """The expression of a whole text that contains the items, and whether it is endless."""
        start, end = "(?s:.*)", "(?s:.*)"
        items = list(items)
        while items and items[0][0] is constants.AT and items[0][1].name in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            start, items = "", items[1:]
        while items and items[-1][0] is constants.AT and items[-1][1].name in ("AT_END", "AT_END_STRING"):
            self.exact &= items[-1][1].name == "AT_END_STRING"
            end, items = "", items[:-1]
        return start + self.sequence(items) + end, bool(end) or (bool(items) and _is_endless(items[-1]))

    def sequence(self, items: Sequence[Any]) -> str:
        return "".join(self._item(op, value) for op, value in items)

    def _item(self, op: Any, value: Any) -> str:
        match op.name:
            case "LITERAL":
                return _character(value)
            case "NOT_LITERAL":
                return f"[^{_character(value)}]"
            case "ANY":
                self.exact = False
                return r"[^\n\r\x{2028}\x{2029}]"
            case "IN":
                return self._class(value)
            case "BRANCH":
                return "(?:" + "|".join(self.sequence(branch) for branch in value[1]) + ")"
            case "SUBPATTERN":
                if value[1] or value[2]:
                    raise Untranslatable("flags are not supported")
                return f"(?:{self.sequence(value[3])})"
            case "MAX_REPEAT" | "MIN_REPEAT":
                return self._repeat(*value)
            case "AT":
                raise Untranslatable("an anchor or a word boundary inside of it is not supported")
            case "ASSERT" | "ASSERT_NOT":
                raise Untranslatable("lookarounds are not supported")
            case "GROUPREF" | "GROUPREF_EXISTS":
                raise Untranslatable("backreferences are not supported")
            case name:
                raise Untranslatable(f"{name.lower().replace('_', ' ')} is not supported")

    def _repeat(self, least: int, most: Any, items: Any) -> str:
        before = self._repeats
        bound = int(least if most is constants.MAXREPEAT else most)
        self._repeats *= max(1, bound)
        if self._repeats > MOST_REPEATS:
            raise Untranslatable(f"it repeats more than {MOST_REPEATS:,} times")
        if most is not constants.MAXREPEAT and most > MOST_REPEATED and _repeats(items):
            raise Untranslatable(f"it repeats a repeat more than {MOST_REPEATED} times")
        inner = self.sequence(items)
        self._repeats = before
        return f"(?:{inner}){{{least},{'' if most is constants.MAXREPEAT else int(most)}}}"

    def _class(self, members: Sequence[Any]) -> str:
        negated = members[0][0] is constants.NEGATE
        inside, alone = "", list[str]()
        for op, value in members[1:] if negated else members:
            match op.name:
                case "LITERAL":
                    inside += _character(value)
                case "RANGE":
                    inside += f"{_character(value[0])}-{_character(value[1])}"
                case _:
                    self.exact = False
                    inside += self._category(value.name, negated, alone)
        if negated:
            return f"[^{inside}]"
        options = [*([f"[{inside}]"] if inside else []), *alone]
        return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"

    def _category(self, name: str, negated: bool, alone: list[str]) -> str:
        known = _EXCLUDED if negated else _INSIDE
        if name in known:
            return known[name]
        if not negated and name in _ALONE:
            alone.append(_ALONE[name])
            return ""
        raise Untranslatable("a class of all but a class is not supported")


def _repeats(value: Any) -> bool:
    """Whether something within has a length that varies."""
    if isinstance(value, parser.SubPattern | list | tuple):
        varies = len(value) == 2 and value[0] in (constants.MAX_REPEAT, constants.MIN_REPEAT)
        return (varies and value[1][0] != value[1][1]) or any(_repeats(one) for one in value)
    return False


def _is_endless(item: Any) -> bool:
    op, value = item
    if op.name not in ("MAX_REPEAT", "MIN_REPEAT"):
        return False
    _, most, inner = value
    single = len(inner) == 1 and inner[0][0].name in ("LITERAL", "NOT_LITERAL", "ANY", "IN")
    return most is constants.MAXREPEAT and single


def _character(code: int) -> str:
    if 0xD800 <= code < 0xE000:
        raise Untranslatable("half of a surrogate pair is no character")
    return f"\\x{{{code:x}}}"
