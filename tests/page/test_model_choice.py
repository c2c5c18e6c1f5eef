"""The list of models in the page's header, where a server has several."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.page.conftest import Screen
from tests.server.test_models import serving_models, source_of, states


def test_each_conversation_has_its_model(
    open_page: Callable[..., Screen], servers: ExitStack, tiny_directory: Callable[[str], Path]
) -> None:
    sources = [source_of(tiny_directory(family)) for family in ("llama", "qwen2")]
    first, second = (source.name for source in sources)
    client = servers.enter_context(serving_models(sources))
    screen = open_page(str(client.base_url))
    pick, options = screen.find("#pick"), screen.find("#pick option")
    screen.until("document.querySelectorAll('#pick option').length === 2")
    assert options.all_text_contents() == [first, second]
    assert (pick.input_value(), screen.find("#model").is_visible()) == (first, False)
    screen.say("one")
    screen.ask("to the first")
    assert states(client)[second] == "unloaded"
    screen.page.click("#new")
    pick.select_option(second)
    screen.until("(title) => document.title === title", f"{second} · Twostroke")
    screen.page.wait_for_selector("#link:text('Connected')")
    screen.ask("to the second")
    assert [body["model"] for body in screen.bodies] == [first, second]
    assert states(client)[second] == "loaded"
    screen.find("#list .title", has_text="to the first").click()
    assert pick.input_value() == first
    screen.page.reload()
    screen.page.wait_for_selector("#pick:visible")
    assert pick.input_value() == first
    screen.find("#list .title", has_text="to the second").click()
    screen.until("(name) => document.querySelector('#pick').value === name", second)
    screen.find("button:text('Answer again')").click()
    screen.until("document.querySelector('.assistant .others')")
    assert screen.bodies[-1]["model"] == second


def test_one_model_is_no_choice(screen: Screen) -> None:
    screen.page.wait_for_selector("#model:text('tiny')")
    assert not screen.find("#pick").is_visible()
    screen.say("yes")
    screen.ask("a question")
    assert "model" not in screen.bodies[-1]
