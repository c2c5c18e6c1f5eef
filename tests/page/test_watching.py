"""What the panel of the engine shows where there are several, and to those who may not watch."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.page.conftest import Screen
from tests.server.conftest import serving
from tests.server.test_engine_process import served
from tests.server.wire import launch
from twostroke.api.llm import LLM
from twostroke.server.engine_process.replicas import ReplicatedEngine


def test_the_viewer_chooses_a_replica(
    open_page: Callable[..., Screen], servers: ExitStack, tiny_directory: Callable[[str], Path]
) -> None:
    engine = ReplicatedEngine([launch(str(tiny_directory("llama")), tells_pages=True)] * 2)
    servers.callback(engine.stop)
    client = servers.enter_context(served(engine))
    screen = open_page(str(client.base_url))
    watched: list[str] = []
    screen.page.on("request", lambda one: watched.append(one.url) if "/watch" in one.url else None)
    choice = screen.find("#replica")
    assert screen.find("#replica option").all_text_contents() == ["0", "1"]
    assert choice.input_value() == "0"
    choice.select_option("1")
    screen.page.wait_for_selector("#pools canvas")
    assert [url.partition("?")[2] for url in watched] == ["replica=1"]
    assert choice.input_value() == "1"


def test_one_engine_is_no_choice(screen: Screen) -> None:
    assert screen.find("#replica-field").is_hidden()


def test_a_key_that_may_not_watch_can_chat(
    open_page: Callable[..., Screen], servers: ExitStack, tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    """The page says what is missing, and all else works."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[anna]\nkey = "first-key"\n')
    keys.chmod(0o600)
    llm = LLM(str(tiny_directory("llama")), kv_bytes=4 << 20, threads=1)
    running = servers.enter_context(serving(llm, api_key_file=str(keys)))
    screen = open_page(running.url, wait=False)
    screen.page.fill("#key", "first-key")
    screen.page.press("#key", "Enter")
    screen.page.wait_for_selector("#link:text('Connected')")
    screen.until("document.querySelector('#unseen').textContent.includes('admin = true')")
    screen.say("yes")
    screen.ask("a question")
    assert screen.find(".answer").first.inner_text().startswith("yes")
    refusals, screen.complaints[:] = list(screen.complaints), []
    assert all("40" in one for one in refusals), "only the refusals themselves"
