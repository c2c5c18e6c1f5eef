"""An explanation as one page: a file that loads nothing, opens offline and can be sent to a colleague."""

import base64
import hashlib
from html import escape
from importlib.resources import files
from pathlib import Path

from twostroke.study.explain.explanation import Explanation, as_json
from twostroke.system import strict_json
from twostroke.system.atomic_files import atomic_replace

SCRIPTS = ("1_elements.js", "2_prefill.js", "3_attention.js", "4_answer.js", "5_cache.js", "6_walk.js")


def page(made: Explanation) -> str:
    """The page's text.

    Texts of prompts and models are in it as JSON whose markup is escaped, and the script makes text nodes of them. The
    page's own policy (CSP) allows its one script and its one style, by their digests, and nothing from elsewhere.
    """
    script = f'"use strict";\n(() => {{\n{"".join(_asset(name) for name in SCRIPTS)}}})();\n'
    style = _asset("page.css")
    parts = {
        "title": escape(f"Twostroke: {made.prompt[:60]}"),
        "style": style,
        "style_hash": _digest(style),
        "script": script,
        "script_hash": _digest(script),
        "data": embedded(made),
    }
    text, *pieces = _asset("page.html").split("{")
    for piece in pieces:  # not str.format: styles and scripts are full of braces
        name, _, rest = piece.partition("}")
        text += parts[name] + rest
    return text


def embedded(made: Explanation) -> str:
    """JSON that may stand in a page: no text in it can end the element or begin another."""
    text = strict_json.dumps(as_json(made))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def write_page(path: Path, made: Explanation) -> None:
    """Write the page; an existing file is replaced when all is written. Raises OSError."""
    text = page(made)
    with atomic_replace(path) as out:
        out.write(text.encode("utf-8", "backslashreplace"))


def _asset(name: str) -> str:
    return (files("twostroke.study.explain") / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
