"""The Python of README and guide runs, and what its comments call true is true. The 135M stands for larger models."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from twostroke.backends.native import library

ROOT = Path(__file__).parents[1]
# What the text around a snippet has made before.
BEFORE = """
from twostroke import LLM, KVCache
text = "The quick brown fox jumps over the lazy dog. " * 4
question = "Name a color."
llm = LLM("smollm2-135m")
"""
# These need a server, files of the reader, or many minutes.
LEFT_OUT = ("http://", "AsyncOpenAI", "requests.post")


def snippets(page: str) -> list[str]:
    """The blocks of Python on a page, each with the line where it stands."""
    text = (ROOT / page).read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [f"# {page}:{text[: one.start()].count(chr(10)) + 1}\n{one[1]}" for one in found]


def runnable(snippet: str, directory: Path) -> str:
    """With the small model, in a directory of its own, and with `x  # True` as a claim that is checked."""
    snippet = re.sub(r'"qwen2\.5-coder-[\d.]+b"', '"smollm2-135m"', snippet).replace("/var/kv", str(directory / "kv"))
    return re.sub(r"^(\w.*?)  # True$", r"assert \1", snippet, flags=re.MULTILINE)


@pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")
@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_snippets_run(page: str, tmp_path: Path) -> None:
    chosen = [one for one in snippets(page) if not any(word in one for word in LEFT_OUT)]
    assert chosen
    program = "\n".join([BEFORE, *(runnable(one, tmp_path) for one in chosen)])
    path = tmp_path / "snippets.py"
    path.write_text(program)
    done = subprocess.run([sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
