"""`twostroke cache`: what is in a tier, by model; checked, and deleted."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.kv.tiers.asking import Open, Server, client, find, key_of, write
from tests.kv.tiers.pages import NAMESPACE, Prompt, content, prompt
from twostroke.cli.app import app
from twostroke.kv.tiers.disk import DiskStore
from twostroke.kv.tiers.names import private_name
from twostroke.kv.tiers.remote import RedisStore

Filled = tuple[str, RedisStore, Prompt, Any]


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["cache", *arguments])


def run_json(*arguments: str) -> dict[str, Any]:
    told = run(*arguments, "--json")
    assert told.exit_code == 0, told.output
    return json.loads(told.stdout)


@pytest.fixture
def filled(redis_server: Server, open_store: Open) -> Filled:
    """The URL of a server with pages of two models and a private one, its store, a prompt's pages, and its client."""
    server = redis_server()
    store, one = open_store(server.url), prompt(6)
    write(store, one)
    write(store, prompt(3, namespace=replace(NAMESPACE, model="small", identity="another")))
    name = private_name()
    store.keep(NAMESPACE, name, memoryview(content(NAMESPACE, name)))
    return server.url, store, one, client(server)


def test_show(filled: Filled) -> None:
    url, *_ = filled
    facts = run_json("show", url)
    assert facts["where"] == url
    assert [(one["model"], one["pages"], one["private_pages"], one["damaged_pages"]) for one in facts["models"]] == [
        ("a model", 6, 1, 0),
        ("small", 3, 0, 0),
    ]
    assert (facts["pages"], facts["private_pages"]) == (9, 1)
    assert facts["bytes"] == sum(one["bytes"] for one in facts["models"]) > 9 * NAMESPACE.page_bytes
    header, *rows = run("show", url).stdout.splitlines()
    assert header.split() == ["model", "pages", "of", "values", "size"]
    assert [row.split()[:4] for row in rows] == [["a", "model", "6", "1"], ["small", "3", "0", *rows[1].split()[3:4]]]


def test_the_url_may_come_from_the_environment(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_KV_REMOTE", filled[0])
    assert run_json("show")["pages"] == 9


def test_verify(filled: Filled) -> None:
    """Damage is deleted and counted, and the exit code tells of it; the next check finds none."""
    url, store, one, raw = filled
    assert run("verify", url).stdout.endswith("all pages are right\n")
    raw.setrange(key_of(store, one, 4), 300, b"x")
    told = run("verify", url)
    assert (told.exit_code, find(store, one)) == (1, 4)
    assert told.stdout.endswith("damaged pages, deleted: 1\n")
    write(store, one)
    raw.setrange(key_of(store, one, 2), 300, b"x")
    told = run("verify", url, "--json")
    assert (told.exit_code, find(store, one)) == (1, 2)
    assert json.loads(told.stdout)["damaged_pages"] == 1
    assert run_json("verify", url)["damaged_pages"] == 0


def test_clear(filled: Filled) -> None:
    """One model's pages, then all; private pages and other programs' keys stay."""
    url, _, _, raw = filled
    raw.set("somebody else's", 1)
    assert run("clear", url, "--model", "nobody").stdout == f"nothing of model nobody is stored in {url}\n"
    told = run("clear", url, "--model", "small").stdout.splitlines()
    assert told[1].split()[:2] == ["small", "3"]
    assert told[-1].startswith("deleted: 3 pages, ")
    assert run_json("clear", url)["pages"] == 6
    left = run_json("show", url)
    assert (left["pages"], left["private_pages"]) == (0, 1)
    assert raw.get("somebody else's") == b"1"


def test_nothing_there(redis_server: Server, open_store: Open) -> None:
    url = redis_server().url
    open_store(url)  # makes the user's key
    for command in ("show", "verify", "clear"):
        told = run(command, url)
        assert (told.exit_code, told.stdout) == (0, f"nothing is stored in {url}\n")


@pytest.mark.parametrize("command", ["show", "verify", "clear"])
@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("redis://:s3cret@127.0.0.1:1", "redis://127.0.0.1:1/0 does not answer"),
        ("http://s3cret/", "this is not the URL of a remote tier"),
        ("/nowhere/at/all", "there is no directory /nowhere/at/all: give that of --kv-disk, or a URL"),
    ],
)
def test_bad_places(command: str, where: str, words: str, open_store: Open) -> None:
    open_store("redis://127.0.0.1:1")  # makes the user's key
    told = run(command, where)
    assert (told.exit_code, told.stdout) == (1, "")
    assert told.stderr.startswith(f"error: {words}")
    assert told.stderr.count("\n") == 1
    assert "s3cret" not in told.stderr


def test_without_a_key_nothing_can_be_there(redis_server: Server) -> None:
    told = run("show", redis_server().url)
    assert told.exit_code == 1
    assert told.stderr.startswith("error: there is no key of this user")


def test_a_directory(tmp_path: Path) -> None:
    """The same commands over a disk tier: damage of one file is found, deleted, and told by the exit code."""
    place = tmp_path / "pages"
    store, one = DiskStore.open(place, 100 << 20), prompt(5)
    assert run("show", str(place)).stdout == f"nothing is stored in {place}\n"
    assert store.write(one.namespace, one.names, one.pages) == 5
    facts = run_json("show", str(place))
    assert (facts["where"], facts["pages"], facts["models"][0]["model"]) == (str(place), 5, "a model")
    assert run("verify", str(place)).exit_code == 0
    (damaged,) = place.rglob(one.names[3].key.hex())
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    told = run("verify", str(place))
    assert told.exit_code == 1
    assert told.stdout.endswith("damaged pages, deleted: 1\n")
    assert store.find(one.namespace, one.names) == 3
    assert run("clear", str(place), "--model", "another").stdout == f"nothing of model another is stored in {place}\n"
    assert run("clear", str(place), "--model", "a model").stdout.splitlines()[-1].startswith("deleted: ")
    assert run_json("show", str(place))["pages"] == 0
    store.close()


def test_a_directory_that_is_no_tier(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for command in ("show", "verify", "clear"):
        told = run(command, str(tmp_path))
        assert (told.exit_code, told.stdout, told.stderr.count("\n")) == (1, "", 1)
        assert told.stderr.startswith("error: ")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.fixture
def on_disk(open_disk: Callable[..., DiskStore], disk: Path) -> tuple[str, Prompt, list[Path]]:
    """A directory with six pages, and their files."""
    one = prompt(6)
    assert open_disk().write(one.namespace, one.names, one.pages) == 6
    return str(disk), one, sorted(file for file in disk.glob("pages/*/*") if len(file.name) == 64)


def test_verify_says_what_it_could_not_check(
    on_disk: tuple[str, Prompt, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, *_ = on_disk
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "another"))
    told = run("verify", where)
    assert told.exit_code == 3
    assert "pages that could not be checked: 6" in told.stdout
    assert "all pages are right" not in told.stdout
    assert json.loads(run("verify", where, "--json").stdout)["unchecked_pages"] == 6


@pytest.mark.parametrize("text", [None, "", "{}"])
def test_pages_are_checked_without_their_models_name(text: str | None, on_disk: tuple[str, Prompt, list[Path]]) -> None:
    where, _, (first, *_) = on_disk
    about = first.parent / "about.json"
    about.unlink()
    if text is not None:
        about.write_text(text)
    assert run("verify", where).stdout.endswith("all pages are right\n")
    with first.open("r+b") as file:
        file.seek(5000)
        file.write(b"x")
    assert run_json("show", where)["pages"] == 6
    told = run("verify", where)
    assert (told.exit_code, first.exists()) == (1, False)
    assert "damaged pages, deleted: 1" in told.stdout


def test_what_is_no_file_is_damage_and_the_rest_is_cleared(on_disk: tuple[str, Prompt, list[Path]]) -> None:
    where, _, paths = on_disk
    for path, make in zip(
        paths, (os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/zero", path), os.mkdir), strict=False
    ):
        path.unlink()
        make(path)
    (paths[3] / "file").write_text("not ours")
    told = run("verify", where)
    assert told.exit_code == 1
    assert "damaged pages, deleted: 3" in told.stdout
    assert "could not be deleted, and are still there: 1" in told.stdout
    told = run("clear", where)
    assert told.exit_code == 1
    assert "deleted: 2 pages" in told.stdout
    assert "could not be deleted, and are still there: 1" in told.stdout
    assert [path.exists() for path in paths] == [False, False, False, True, False, False]


def test_a_directory_that_can_only_be_read_says_so(
    on_disk: tuple[str, Prompt, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, _, paths = on_disk
    monkeypatch.setattr("os.access", lambda *_: False)
    assert run("verify", where).stdout.endswith("all pages are right\n")
    told = run("clear", where)
    assert told.exit_code == 1
    assert "Read-only file system" in told.output
    assert all(path.exists() for path in paths)
