"""The package as `pip install .` leaves it: no extra is installed."""

import subprocess
import sys

import pytest

EXTRAS = (
    *("torch", "starlette", "fastapi", "uvicorn", "prometheus_client", "llguidance", "httpx", "yaml"),
    *("redis", "msgspec", "opentelemetry", "transformers", "gguf"),
)
PROGRAM = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {EXTRAS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from twostroke.cli import main

sys.argv = ["twostroke", *sys.argv[1:]]
main()
"""


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "plan", "simulate", "models", "explain", "cache"])
def test_commands_have_help(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_a_model_answers() -> None:
    done = run("generate", "--model", "smollm2-135m", "--max-tokens", "4", "--backend", "auto", "Hi")
    assert done.returncode == 0 or "twostroke[torch]" in done.stderr, done.stderr


def test_serving_names_what_is_missing() -> None:
    done = run("serve", "--model", "smollm2-135m", "--port", "0")
    assert done.returncode == 1
    assert "twostroke[serve]" in done.stderr or "[serve]" in done.stderr, done.stderr
    assert done.stderr.strip().count("\n") == 0, done.stderr
