"""The page: one file, nothing from elsewhere, no text that acts."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
from pathlib import Path

import pytest

from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.methods import method
from twostroke.sampling.params import SamplingParams
from twostroke.study.explain.explanation import ExplainOptions, Explanation, as_json, explain
from twostroke.study.explain.html_page import page, write_page

HOSTILE = "</script><script>document.title='gone'</script><!-- <b>fox</b> & \u2028\u202e over\ud800"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Explanation:
    directory = write_model("llama", tmp_path_factory.mktemp("page"))
    llm = LLM(str(directory), backend="reference", kv_bytes=8 << 20, threads=1)
    text = HOSTILE.replace("\ud800", "")
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    aspects = ExplainOptions(layer=1, naive=3, method=method("repeat"))
    return explain(llm, HOSTILE, llm.tokenizer.encode(text)[:40], params, aspects)


class Reader(html.parser.HTMLParser):
    """The elements of a page, with their attributes and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), []))
        self._open = True

    def handle_endtag(self, tag: str) -> None:
        self._open = False

    def handle_data(self, data: str) -> None:
        if self._open:
            self.found[-1][2].append(data)


def test_one_file_without_anything_from_elsewhere(made: Explanation, tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", made)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    found = Reader(text).found
    assert not [attributes for _, attributes, _ in found if {"src", "href"} & set(attributes)]
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", text)
    scripts = [(attributes, "".join(texts)) for tag, attributes, texts in found if tag == "script"]
    assert [attributes.get("id") for attributes, _ in scripts] == ["data", None]
    assert json.loads(scripts[0][1]) == json.loads(json.dumps(as_json(made)))
    (policy,) = [str(one["content"]) for _, one, _ in found if one.get("http-equiv") == "Content-Security-Policy"]
    style = next("".join(texts) for tag, _, texts in found if tag == "style")
    for kind, code in (("script", scripts[1][1]), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_texts_are_never_markup(made: Explanation) -> None:
    text = page(made)
    assert "<script>document" not in text
    assert "<b>fox" not in text
    assert text.count("</script>") == 2
    assert "\u2028" not in text
    code = "".join(texts[0] for tag, attributes, texts in Reader(text).found if tag == "script" and not attributes)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", code)
