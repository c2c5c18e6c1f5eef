"""Several keys with names, in a file that changes while the server runs."""

import logging
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import serving
from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.server.settings import Settings
from twostroke.server.tenants.key_file import ApiKey, read_keys


def status(http: httpx.Client, key: str) -> int:
    return http.get("/v1/models", headers={"x-api-key": key}).status_code


def test_keys_are_rotated_without_a_restart(
    open_tiny: Callable[..., LLM], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Written in place, replaced as Kubernetes does, and broken: then those before stay."""
    caplog.set_level(logging.INFO)
    file = tmp_path / "keys"
    file.write_text("anna first\n")
    with serving(open_tiny(), api_key="own", api_key_file=str(file)) as running, running.http() as http:
        assert [status(http, key) for key in ("own", "first", "second", "anna", "")] == [200, 200, 401, 401, 401]
        file.write_text("anna first\nanna second # not a comment\n")
        assert [status(http, key) for key in ("first", "second")] == [200, 401], "a broken file changes nothing"
        assert "line 2 must be KEY, or NAME KEY" in caplog.text
        file.write_text("anna first\nanna second\n")
        assert [status(http, key) for key in ("first", "second")] == [200, 200]
        (tmp_path / "new").write_text("bert second\n")
        (tmp_path / "new").replace(file)
        assert [status(http, key) for key in ("own", "first", "second")] == [200, 401, 200]
        file.unlink()
        assert [status(http, key) for key in ("first", "second")] == [401, 200]
        assert http.get("/v1/models").status_code == 401


def test_a_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("anna a-key \n\n# others\n  b-key\n", encoding="utf-8-sig")  # as Notepad does
    assert read_keys(file) == [ApiKey.of("a-key", "anna"), ApiKey.of("b-key")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("# none\n", "has no key"),
        ("a b c", "line 1 must be"),
        ("\udcff", "UTF-8"),
    ],
)
def test_files_that_are_refused(content: str | None, message: str, tmp_path: Path) -> None:
    """In one line, before a model is loaded."""
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidRequest, match=message):
        Settings(api_key_file=str(file))
