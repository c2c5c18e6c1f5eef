"""Outside programs against our server: `python -m clients.run`, or with names (`openai llm`) for some of them.

Each file try_NAME.py is what a user of a client would write, with assertions. It passes if it ends without an error.
Its header (PEP 723) pins the client's packages, which get a virtual environment under the user's cache directory, and
names the model that it talks to, and the client where it has no package. The table of all clients is written to
docs/clients.md.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peer.environments import CannotSetUp, last_words, log_file, run
from benchmarks.server_process import ServerFailed, ServerProcess
from clients.tokenizer import tokenizer_directory
from twostroke.system.home import home

FOLDER, TABLE = Path(__file__).parent, Path(__file__).parents[1] / "docs" / "clients.md"
WORK = home() / "clients"
PATIENCE_S = 1200.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # clients must not ask the internet
HEADER = """# Clients

This page is for users who point an existing client at the server: it lists the programs that were tried with it. \
`make test-clients` installs each program in an environment of its own, starts `twostroke serve`, runs typical code of \
its users (in [clients/](../clients)), and writes this table.

| client | model | tried | result |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Client:
    """A file try_NAME.py.

    Attributes:
        requirements: packages for pip, all pinned; none for a client that needs Python alone.
        model: the model of the catalog that it talks to.
        title: its name and version.
        tried: what it does, in words.
    """

    path: Path
    requirements: tuple[str, ...]
    model: str
    title: str
    tried: str

    @property
    def name(self) -> str:
        return self.path.stem.removeprefix("try_")

    @property
    def environment(self) -> Path:
        return WORK / self.name


def read(path: Path) -> Client:
    """A client by the header and the docstring of its file."""
    text = path.read_text()
    header = re.search(r"^# /// script\n(.*?)^# ///$", text, re.MULTILINE | re.DOTALL)
    tried = ast.get_docstring(ast.parse(text))
    assert header is not None, f"{path} has no header"
    assert tried is not None, f"{path} does not say what it tries"
    facts = tomllib.loads(re.sub(r"^# ?", "", header[1], flags=re.MULTILINE))
    requirements, ours = tuple(facts["dependencies"]), facts["tool"]["twostroke"]
    title = ", ".join(re.sub(r"\[.*\]", "", one).replace("==", " ") for one in requirements)
    return Client(path, requirements, ours["model"], ours.get("name", title), " ".join(tried.split()))


def install(client: Client) -> None:
    """Make the client's environment, unless it exists with these requirements. Raises CannotSetUp."""
    recipe = "\n".join(client.requirements)
    installed = client.environment / "installed"  # written last: an environment without it is incomplete
    if installed.is_file() and installed.read_text() == recipe:
        return
    log = log_file(WORK, f"setup-{client.name}")
    run([sys.executable, "-m", "venv", "--clear", str(client.environment)], log)
    if client.requirements:
        run([str(client.environment / "bin" / "python"), "-m", "pip", "install", *client.requirements], log)
    installed.write_text(recipe)


def outcome(client: Client, url: str) -> str:
    """Run a client; an empty text, or the reason why it does not pass."""
    log = log_file(WORK, client.name)
    variables = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "OLLAMA_HOST": url,
        "MODEL": client.model,
        "TOKENIZER": tokenizer_directory(client.model, WORK),
        "PATH": os.pathsep.join([str(client.environment / "bin"), os.environ["PATH"]]),
    }
    command = [str(client.environment / "bin" / "python"), str(client.path)]
    with log.open("a") as stream, tempfile.TemporaryDirectory() as scratch:
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **OFFLINE, **variables},
                cwd=scratch,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                timeout=PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"not finished after {PATIENCE_S:.0f} s"
    return f"{_reason(log)} (more in {log.name})" if done.returncode else ""


def _reason(log: Path) -> str:
    """What a log says about a failure: the error, or the assertion that did not hold."""
    error = last_words(log)
    held = re.findall(r"^\s+(assert .*)$", log.read_text(errors="replace"), re.MULTILINE)
    return f"`{held[-1]}`" if held and error == "AssertionError" else error


def try_model(model: str, clients: Sequence[Client]) -> dict[str, str]:
    """Every client's outcome with a server of this model, by name."""
    found: dict[str, str] = {}
    serve = [sys.executable, "-m", "twostroke", "serve", "--model", model, "--port", "{port}"]
    with ServerProcess(model, serve, WORK) as server:
        for client in clients:
            try:
                install(client)
                found[client.name] = outcome(client, server.url)
            except CannotSetUp as error:
                found[client.name] = f"cannot be installed: {error}"
            print(f"{client.title}: {found[client.name] or 'passes'}", flush=True)
    return found


def table(clients: Sequence[Client], outcomes: dict[str, str]) -> str:
    rows = (
        f"| {client.title} | {client.model} | {client.tried} | {outcomes[client.name] or 'passes'} |\n"
        for client in clients
    )
    return HEADER + "".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    clients = [read(path) for path in sorted(FOLDER.glob("try_*.py"))]
    parser.add_argument("names", nargs="*", help=f"{', '.join(client.name for client in clients)}; default: all")
    names = parser.parse_args().names
    if unknown := set(names) - {client.name for client in clients}:
        parser.error(f"there is no client {', '.join(sorted(unknown))}")
    chosen = [client for client in clients if not names or client.name in names]
    outcomes: dict[str, str] = {}
    for model in sorted({client.model for client in chosen}):
        try:
            outcomes |= try_model(model, [client for client in chosen if client.model == model])
        except ServerFailed as error:
            raise SystemExit(f"error: {error}") from None
    if not names:
        TABLE.write_text(table(clients, outcomes))
    if failed := [name for name, reason in outcomes.items() if reason]:
        raise SystemExit(f"error: {', '.join(failed)} failed")


if __name__ == "__main__":
    main()
