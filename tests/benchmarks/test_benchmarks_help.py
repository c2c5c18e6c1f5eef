"""Every program of benchmarks/ has --help, with only the packages that `pip install twostroke` installs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from twostroke.system.extras import install_command

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(
    [
        *(path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()),
        *(path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")),
    ]
)
# Packages of the extras in pyproject.toml, without httpx, which huggingface_hub in the base may install.
WITHOUT = """
import runpy, sys

EXTRAS = {"torch", "httpx", "fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client",
          "llguidance", "opentelemetry", "openai", "requests", "schemathesis", "hypothesis", "transformers", "gguf"}

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
"""
RUN = """
sys.argv[1:], program = ["--help"], sys.argv[1]
runpy.run_module(program, run_name="__main__", alter_sys=True)
"""
# The package is imported once, and each program runs in a copy of that process. Prints {program: [code, its text]}.
HELP_OF_EACH = """
import json, os, tempfile, twostroke.api.llm, twostroke.cli.app

found, programs = {}, sys.argv[1:]
for program in programs:
    with tempfile.TemporaryFile() as written:
        if not (pid := os.fork()):
            os.dup2(written.fileno(), 1)
            os.dup2(written.fileno(), 2)
            sys.argv[1:] = ["--help"]
            runpy.run_module(program, run_name="__main__", alter_sys=True)
            sys.exit()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        written.seek(0)
        found[program] = [code, written.read().decode()]
print(json.dumps(found))
"""


def test_programs_are_found() -> None:
    assert {"peer", "soak", "itl", "quality", "serving"} <= set(PROGRAMS)


@pytest.fixture(scope="module")
def helps() -> dict[str, tuple[int, str]]:
    """The exit code of each program with --help, and what it wrote."""
    command = [sys.executable, "-c", WITHOUT + HELP_OF_EACH, *(f"benchmarks.{program}" for program in PROGRAMS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_needs_the_base_install_alone(program: str, helps: dict[str, tuple[int, str]]) -> None:
    code, written = helps[f"benchmarks.{program}"]
    assert code == 0, written[-2000:]
    assert "usage:" in written.lower()


@pytest.mark.parametrize(("program", "name"), [("soak", "dev")])
def test_a_missing_extra_is_named_before_anything_is_measured(program: str, name: str) -> None:
    without = (WITHOUT + RUN).replace('["--help"]', "[]").replace('"pydantic", ', "")  # typer looks for it
    command = [sys.executable, "-c", without, f"benchmarks.{program}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: this benchmark needs ")
    assert done.stderr.endswith(f": {install_command(name)}\n")
    assert done.stderr.count("\n") == 1
