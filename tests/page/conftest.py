"""The server's page in Debian's Chromium, over a tiny model that a grammar tells what to write."""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.server.conftest import Serving, serving
from twostroke.api.llm import LLM


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Of this folder: while Playwright runs, its thread has an event loop."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the page's tests need Playwright (pip install)")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("the page's tests need Chromium (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        # As root, Chromium runs only without its sandbox. To play a GPU in software costs it a third of its time.
        options = ["--no-sandbox", "--disable-gpu", "--disable-software-rasterizer"]
        yield playwright.chromium.launch(executable_path=program, args=options)


@pytest.fixture(scope="package")
def server(tiny_directory: Callable[[str], Path]) -> Iterator[Serving]:
    llm = LLM(str(tiny_directory("llama")), kv_bytes=4 << 20, threads=1)
    with serving(llm) as running:
        yield running


@dataclass
class Screen:
    """A tab with the page.

    Attributes:
        page: Playwright's.
        bodies: what it has asked of /v1/chat/completions, in order.
        complaints: errors of its scripts, and of the browser about them.
    """

    page: Any
    bodies: list[dict[str, Any]] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(1000 * PATIENCE_S)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda line: self.complaints.append(line.text) if line.type == "error" else None)
        self.page.on("request", self._sent)

    def _sent(self, request: Any) -> None:
        if request.url.endswith("/v1/chat/completions"):
            self.bodies.append(json.loads(request.post_data))

    def find(self, selector: str, **options: Any) -> Any:
        return self.page.locator(selector, **options)

    def ask(self, text: str, wait: bool = True) -> None:
        """Ask a question as a person does, and wait for the answer."""
        self.page.fill("#ask", text)
        self.page.press("#ask", "Enter")
        if wait:
            self.answered()

    def answered(self, patience_s: float = PATIENCE_S) -> None:
        done = "document.querySelector('.answer .facts')?.textContent && !document.querySelector('.going')"
        self.until(done, patience_s=patience_s)
        self.page.wait_for_selector("#send:not([hidden])")

    def until(self, script: str, argument: Any = None, patience_s: float = PATIENCE_S) -> None:
        """Wait until a script's value is true; Playwright's own way of waiting needs what the page's policy forbids."""
        end = time.monotonic() + patience_s
        while not self.page.evaluate(script, argument):
            assert time.monotonic() < end, f"it did not come true: {script}"
            self.page.wait_for_timeout(10)

    def say(self, text: str, **fields: Any) -> None:
        """Let the model answer exactly this."""
        self.extra({"choice": [text], **fields})

    def extra(self, fields: dict[str, Any]) -> None:
        """Further fields of every request."""
        self.settings({"extra": json.dumps(fields)})

    def settings(self, values: dict[str, str]) -> None:
        self.page.click("#show-settings")
        for name, value in values.items():
            box = self.find(f"#{name}")
            kind = box.evaluate("(node) => node.tagName === 'SELECT' ? 'select' : node.type")
            if kind == "select":
                box.select_option(value)
            elif kind == "checkbox":
                box.set_checked(bool(value))
            else:
                box.fill(value)
        self.page.click("#show-settings")


@pytest.fixture
def servers() -> Generator[contextlib.ExitStack]:
    """What a test starts beside the server of this folder: it ends after the pages, which ask it to their end."""
    with contextlib.ExitStack() as started:
        yield started


@pytest.fixture
def open_page(browser: Any, servers: contextlib.ExitStack) -> Generator[Callable[..., Screen]]:
    """A function that opens a server's page in a browser without a past; no script may have failed in the end."""
    contexts: list[Any] = []
    screens: list[Screen] = []

    def opened(url: str, wait: bool = True, **options: Any) -> Screen:
        chosen = {"viewport": {"width": 1360, "height": 860}, "reduced_motion": "reduce"} | options
        contexts.append(browser.new_context(**chosen))
        contexts[-1].grant_permissions(["clipboard-read", "clipboard-write"])
        screens.append(Screen(contexts[-1].new_page()))
        screens[-1].page.goto(url)
        if wait:
            screens[-1].page.wait_for_selector("#link:text('Connected')")
        return screens[-1]

    yield opened
    for context in contexts:
        context.close()
    assert [screen.complaints for screen in screens] == [[]] * len(screens)


@pytest.fixture
def screen(open_page: Callable[..., Screen], server: Serving) -> Screen:
    return open_page(server.url)
