"""The options of tiers: how they are read, what is printed, and what a second process finds."""

from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import Result

from tests.kv.tiers.memory_store import MemoryStore, Pages
from twostroke.api import open_engine
from twostroke.api.llm import LLM
from twostroke.cli.eval import command_line
from twostroke.cli.options import ModelOptions
from twostroke.cli.report import tier_hits_text, tiers_text
from twostroke.engine.forecast import Forecast
from twostroke.kv.tiers.tiers import Tiers
from twostroke.study.evaluate.tasks import NameIndex

PROMPT = ("--raw", "--prompt", "the quick brown fox jumps over the lazy dog " * 4, "--max-tokens", 4)
SECRET = "redis://:s3cret/@127.0.0.1:7777/2"


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Models open over a disk that they share and that takes everything. What they asked for."""
    asked: list[tuple[Any, ...]] = []
    pages: Pages = {}

    def opened(*given: Any) -> Tiers:
        asked.append(given)
        tiers = Tiers(given[0] or 0, MemoryStore("disk", pages))
        tiers.first_touch_s = 0.0
        return tiers

    monkeypatch.setattr(open_engine, "open_tiers", opened)
    return asked


def test_options_reach_the_model(stored: list[tuple[Any, ...]], run: Callable[..., Result], tiny: str) -> None:
    sizes = ("--kv-host", "8MiB", "--kv-disk", "here", "--kv-disk-bytes", "1.5GB")
    assert run("generate", "-m", tiny, *PROMPT, *sizes, "--kv-remote", SECRET).exit_code == 0
    assert stored == [(8 << 20, "here", 1_500_000_000, SECRET, False)]


def test_a_url_from_the_environment(
    stored: list[tuple[Any, ...]], run: Callable[..., Result], tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_KV_REMOTE", SECRET)
    assert run("generate", "-m", tiny, *PROMPT).exit_code == 0
    assert stored == [(None, None, None, SECRET, False)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--kv-host", "much"), "'much' is no size: write 2GiB, 512MiB or a number of bytes"),
        (("--kv-disk-bytes", "-1"), "'-1' is no size"),
        (("--kv-remote", "s3cret@host"), "write redis://HOST:PORT/DB"),
        (("--kv-remote", "redis://"), "write redis://HOST:PORT/DB"),
    ],
)
@pytest.mark.parametrize("command", [("generate", *PROMPT), ("chat",), ("serve",), ("bench", "latency")])
def test_bad_values(
    command: tuple[object, ...], options: tuple[str, str], words: str, run: Callable[..., Result]
) -> None:
    result = run(*command, "-m", "/nowhere", *options)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert "s3cret" not in result.output


def test_a_quota_without_a_directory(run: Callable[..., Result]) -> None:
    """In one line, before the model is looked for."""
    result = run("generate", "-m", "/nowhere", *PROMPT, "--kv-disk-bytes", "1GiB")
    assert result.exit_code == 1
    assert result.stderr == "error: kv_disk_bytes limits a disk tier: give its directory too (kv_disk)\n"


def test_a_quota_in_which_nothing_fits(run: Callable[..., Result]) -> None:
    result = run("generate", "-m", "/nowhere", *PROMPT, "--kv-disk", "kv", "--kv-disk-bytes", "3")
    assert result.exit_code == 1
    assert result.stderr == "error: kv_disk_bytes is a number of bytes, at least 1 MiB, not 3\n"


def slow(context: int, count: int) -> float:
    """Predicted seconds to compute tokens: a tiny model is quicker than any store."""
    return 1.0 * count


def test_a_second_process_says_what_it_found(
    stored: list[tuple[Any, ...]],
    run: Callable[..., Result],
    run_json: Callable[..., dict[str, Any]],
    tiny: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Forecast, "prefill", lambda *_: slow)
    first = run_json("generate", "-m", tiny, *PROMPT)
    again = run_json("generate", "-m", tiny, *PROMPT)
    whole = (first["prompt_tokens"] - 1) // 16 * 16
    assert first["cached_tokens_by_tier"] == {"pool": 0, "host": 0, "disk": 0, "remote": 0}
    assert again["cached_tokens_by_tier"] == {"pool": 0, "host": 0, "disk": whole, "remote": 0}
    assert (again["cached_tokens"], again["token_ids"]) == (whole, first["token_ids"])
    line = run("generate", "-m", tiny, *PROMPT).stderr
    assert f"{first['prompt_tokens']} prompt ({whole} from disk) + 4 output tokens" in line


def test_found() -> None:
    assert tier_hits_text({}) == tier_hits_text({"pool": 0}) == ""
    assert tier_hits_text({"disk": 3200, "pool": 16}) == "16 from the pool, 3,200 from disk"
    assert tier_hits_text({"host": 1, "remote": 2}) == "1 from the host, 2 from the remote store"


def test_what_serve_prints(tiny_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    disk, remote = MemoryStore("disk"), MemoryStore("remote")
    disk.most_bytes = 50 << 30
    monkeypatch.setattr(remote, "most_bytes", None)
    monkeypatch.setattr(open_engine, "open_tiers", lambda *_: Tiers(8 << 30, disk, remote))
    expected = "16.0 MiB in the pool, 8.0 GiB in ordinary memory, 50.0 GiB on disk in memory:disk, "
    assert tiers_text(tiny_llm()) == f"{expected}remote at memory:remote"


def test_a_report_keeps_no_password() -> None:
    command = command_line(NameIndex(), ModelOptions(kv_remote=SECRET))
    assert command.endswith("--kv-remote 'redis://***@127.0.0.1:7777/2'")
