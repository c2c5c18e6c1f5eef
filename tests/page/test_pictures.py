"""The pictures in README and docs/page.md: the page over a real model, with other clients beside it.

TWOSTROKE_PICTURES=1 python -m pytest tests/page/test_pictures.py
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.page.conftest import Screen
from tests.server.conftest import Serving, serving
from twostroke.api.llm import LLM
from twostroke.methods import method
from twostroke.sampling.params import SamplingParams
from twostroke.study.explain.explanation import ExplainOptions, explain
from twostroke.study.explain.html_page import write_page

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WHY = "pictures are made on demand (TWOSTROKE_PICTURES=1)"
pytestmark = pytest.mark.skipif(not os.environ.get("TWOSTROKE_PICTURES"), reason=WHY)
QUESTION = "Explain what a cache is, in a short list, with a small Python example."


@pytest.fixture(scope="module")
def real() -> Iterator[Serving]:
    with serving(LLM("smollm2-135m", kv_bytes=96 << 20), model_name="smollm2-135m") as running:
        yield running


def others(running: Serving, number: int) -> int:
    """Another client: a long prompt, of which the first half is that of all."""
    prompt = (
        "A page of a cache is never written twice. " * 12 + f"Story {number}: " + "and then it went on. " * 9 * number
    )
    with running.http() as http:
        body = {"prompt": prompt, "max_tokens": 160, "ignore_eos": True}
        return http.post("/v1/completions", json=body, timeout=300).status_code


def test_pictures(open_page: Callable[..., Screen], real: Serving) -> None:
    screen = open_page(real.url, viewport={"width": 1360, "height": 820}, device_scale_factor=1)
    screen.page.set_default_timeout(120_000)
    screen.settings({"temperature": "0", "max_tokens": "160"})
    assert others(real, 0) == 200  # now the others find what they have in common, and share its pages
    with ThreadPoolExecutor(4) as clients:
        sent = [clients.submit(others, real, number) for number in range(1, 5)]
        screen.ask(QUESTION, wait=False)
        screen.until("parseInt(document.querySelector('.facts')?.textContent) > 70", patience_s=120)
        screen.page.screenshot(path=IMAGES / "page.png")
        screen.answered(120)
        assert {one.result() for one in sent} == {200}

    screen.page.click("#new")
    screen.settings({"max_tokens": "60"})
    screen.ask("Why is the sky blue?", wait=False)
    screen.answered(120)
    screen.find("button:text('Tokens')").click()
    screen.find(".token").nth(11).click()
    screen.find(".weighed").first.wait_for()
    screen.page.screenshot(path=IMAGES / "page-attention.png")

    screen.find(".answer > div .actions button").nth(1).click()
    screen.answered(120)
    screen.page.wait_for_selector(".cache figcaption:text('were there before')")
    screen.page.screenshot(path=IMAGES / "page-fork.png")

    screen.page.click("#new")
    screen.settings({"compare": "yes", "other": "repeat", "max_tokens": "90"})
    screen.ask("Write one sentence on each of the four seasons, as a list.", wait=False)
    screen.answered(120)
    screen.page.screenshot(path=IMAGES / "page-side-by-side.png")

    phone = open_page(real.url, viewport={"width": 390, "height": 780}, color_scheme="dark")
    phone.settings({"temperature": "0", "max_tokens": "90"})
    phone.ask(QUESTION, wait=False)
    phone.answered(120)
    phone.page.screenshot(path=IMAGES / "page-phone.png")


def test_pictures_of_the_tutorial(browser: Any, real: Serving, tmp_path: Path) -> None:
    """Of each step of the page that `explain --html` writes for the tutorial's prompt."""
    prompt = "Explain how a CPU works to a 5-year-old"
    tokens = real.llm.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    options = ExplainOptions(method=method("repeat"))
    write_page(tmp_path / "page.html", explain(real.llm, prompt, tokens, SamplingParams(max_tokens=8), options))
    tab = browser.new_page(viewport={"width": 860, "height": 2400})
    shown = {"tokens": "#tokens", "embedding": "main .scroll", "prefill": "main", "attention": ".map", "layers": "main"}
    shown |= {"decode": "main .scroll", "cache": "main", "method": "main"}
    for name, selector in shown.items():
        tab.goto(f"{(tmp_path / 'page.html').as_uri()}#{name}")
        tab.wait_for_selector(selector)
        tab.wait_for_timeout(300)
        box = tab.locator(selector).first.bounding_box()
        height = min(box["height"], 640 if name == "attention" else 420)
        tab.screenshot(path=IMAGES / f"explain-{name}.png", clip=box | {"height": height})
