"""Techniques from outside the tree: files, modules, installed packages."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from twostroke.errors import InvalidRequest
from twostroke.methods import METHODS, load_installed, load_module, method, method_of, registry
from twostroke.study.evaluate.contenders import at_budgets, contender

TECHNIQUE = """
from dataclasses import dataclass

from twostroke import Decode, Method, Prefill
from twostroke.fields import integer


@dataclass(frozen=True)
class Twice(Method, name="twice"):
    times: int = integer(2, least=1, most=4)

    def program(self, prompt):
        yield Decode((yield Prefill(prompt * self.times)))
"""


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    """Removes techniques that a test registers."""
    before, loaded = dict(METHODS), set(registry.loaded_sources)
    yield
    METHODS.clear()
    METHODS.update(before)
    registry.loaded_sources.clear()
    registry.loaded_sources.update(loaded)


def written(directory: Path, text: str = TECHNIQUE, name: str = "mine.py") -> str:
    (directory / name).write_text(text)
    return str(directory / name)


def test_a_file(tmp_path: Path) -> None:
    load_module(written(tmp_path))
    assert repr(method("twice", times=3)) == "Twice(times=3)"
    with pytest.raises(InvalidRequest, match="twice: times must be an integer from 1 to 4, not 5"):
        method("twice", times=5)
    load_module(str(tmp_path / "mine.py"))  # once more does nothing


def test_a_parameter_may_have_any_name() -> None:
    """Also that of a function's own argument, from `--method-option name=x` or a body."""
    for make in (lambda: method_of("tova", {"name": 3}), lambda: contender("tova", name=3)):
        with pytest.raises(InvalidRequest, match="method tova has no parameter 'name'; it has"):
            make()
    body: Any = {"name": "tova", "sinks": 2}
    assert method(**body) == method_of("tova", {"sinks": 2})
    for given in ("name", "shares", "length"):
        with pytest.raises(InvalidRequest, match=f"method tova has no parameter '{given}'"):
            at_budgets("tova", (), None, **{given: 3})
    with pytest.raises(InvalidRequest, match="method tova has no parameter 'name'"):
        method("compose", then="tova:name=3")


def test_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, name="mine_as_a_module.py")
    monkeypatch.syspath_prepend(tmp_path)
    load_module("mine_as_a_module")
    assert method("twice").name == "twice"


def test_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, name="mine_installed.py")
    monkeypatch.syspath_prepend(tmp_path)
    points = [EntryPoint("mine", "mine_installed", registry.GROUP)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.GROUP else [])
    assert "twice" not in METHODS
    assert method("twice").name == "twice", "an unknown name is looked for among installed packages"
    load_installed()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nowhere", "line 1: ModuleNotFoundError: No module named 'nowhere'"),
        ("x = (", "line 1: SyntaxError: "),
        ("\n\n1 / 0", "line 3: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)", "line 2: SystemExit: 3"),
        ("x = 1", "has no technique"),
        (TECHNIQUE.replace('"twice"', '"repeat"'), "name 'repeat' is taken by twostroke.methods.repeat.Repeat"),
        (TECHNIQUE + '\nclass Half(Method, name="half"):\n    pass', "Half"),
        (TECHNIQUE.replace(" = integer(2, least=1, most=4)", ""), "times"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path, before = written(tmp_path, text), dict(METHODS)
    with pytest.raises(InvalidRequest) as caught:
        load_module(path)
    assert str(caught.value).startswith(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert before == METHODS


def test_a_file_of_any_name_is_read_as_python(tmp_path: Path) -> None:
    load_module(written(tmp_path, name="technique.txt"))
    assert method("twice").name == "twice"
    with pytest.raises(InvalidRequest, match=r"model\.json cannot be used: line 1: NameError: name 'true'"):
        load_module(written(tmp_path, '{"tied": true}', name="model.json"))


def test_what_is_not_there() -> None:
    with pytest.raises(InvalidRequest, match=r"there is no file /no/such\.py"):
        load_module("/no/such.py")
    with pytest.raises(InvalidRequest, match=r"no_such_module cannot be used: .*No module named 'no_such_module'"):
        load_module("no_such_module")


def test_two_files_of_one_name(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    load_module(written(tmp_path))
    load_module(written(tmp_path / "other", TECHNIQUE.replace("Twice", "Thrice").replace("twice", "thrice")))
    assert (method("twice").name, method("thrice").name) == ("twice", "thrice")
