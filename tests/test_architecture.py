"""The layers in docs/architecture.md are the layers of the code."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from twostroke.backends.native import library

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "twostroke"
ALSO = {"__main__": "cli", "__init__": "api"}  # files of one layer with another name
REFERENCE_FILES = """activations arrays attention_tiles backend decoder entry_codes latent_attention linear_attention
    memory operations routing sharded states"""
REFERENCE = {f"backends/reference/{name}.py" for name in REFERENCE_FILES.split()}
WITH_TORCH = {
    *REFERENCE,
    "backends/ranks/rank_group.py",
    "backends/ranks/collectives.py",
    "study/pruning.py",
    "study/distilling.py",
}


def layers() -> list[str]:
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(r"```layers\n(.*?)```", text, re.DOTALL)
    assert block is not None
    return [line.split()[0] for line in block[1].splitlines()]


def imports(path: Path) -> set[str]:
    """Every twostroke module that a file imports, also inside functions, and for type checking only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("twostroke"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if module_file(name) else str(node.module) for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("twostroke")}
    return found


def module_file(module: str) -> Path | None:
    base = ROOT / Path(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def layer_of(path: Path) -> str:
    """The longest name in the list that the file lies under: a room, or a part of a room with a layer of its own."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    names = ["/".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
    found = next((name for name in names if name in layers()), parts[0])
    return ALSO.get(found, found)


def test_imports_point_down() -> None:
    order = {name: depth for depth, name in enumerate(layers())}
    found = {layer_of(path) for path in PACKAGE.rglob("*.py")} - {"study"}  # a room all of whose parts have layers
    assert found == set(order), "the page lists every layer, and no other"
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in PACKAGE.rglob("*.py")
        for module in imports(path)
        if (target := module_file(module)) and order[layer_of(target)] < order[layer_of(path)]
    ]
    assert not wrong


def test_no_import_circles() -> None:
    edges = {path: {target for m in imports(path) if (target := module_file(m))} for path in PACKAGE.rglob("*.py")}
    done: set[Path] = set()

    def visit(path: Path, above: tuple[Path, ...]) -> None:
        assert path not in above, f"circle: {' > '.join(p.name for p in [*above[above.index(path) :], path])}"
        if path not in done:
            for target in edges[path] - {path}:
                visit(target, (*above, path))
            done.add(path)

    for path in edges:
        visit(path, ())


def test_importing_the_package_is_quick() -> None:
    """Neither the package nor the command line loads torch or numpy before something runs."""
    code = "import sys, twostroke, twostroke.cli; sys.exit(not {'torch', 'numpy'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def imported_at_once(node: ast.AST) -> Iterator[str]:
    """The imports that run when a file is imported, without those for type checking or inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        elif not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from imported_at_once(child)


def test_who_imports_torch() -> None:
    """Imports at the top of a file, which load torch whenever the file is imported."""
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for module in imported_at_once(ast.parse(path.read_text()))
        if "torch" in module.split(".")
    }
    assert {name for name in found if not name.startswith("backends/triton/")} == WITH_TORCH


NATIVE = """
import sys

from twostroke import LLM, KVCache, method

llm = LLM("smollm2-135m", backend="native", kv_bytes=64 << 20)
prompt, options = list(range(100, 130)) * 2, {"max_tokens": 6, "ignore_eos": True, "seed": 1}
sampled = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "logprobs": 2}
for chosen, fields in (
    (None, {}),
    (None, sampled),
    (method("snap", window=4, budget=16), sampled),
    (method("drop", window=16, every=3, by="attention"), {}),
    (method("drop", window=16, every=3, by="key-norm"), {}),
    (method("speculative"), sampled),
):
    (completion,) = llm.generate([prompt], method=chosen, **options, **fields)
    assert len(completion.tokens) == 6
llm.prefill(prompt).save(sys.argv[1])
kv = KVCache.load(sys.argv[1], llm)
assert kv.tokens == prompt
assert len(list(llm.decode(kv, **options))) == 6
sys.exit("torch was loaded" if "torch" in sys.modules else 0)
"""


@pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")
def test_the_native_backend_does_without_torch(tmp_path: Path) -> None:
    """Opening, sampling, attention weights, and saving and loading values."""
    command = [sys.executable, "-c", NATIVE, str(tmp_path / "a.kv")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_the_package_offers() -> None:
    """Every name exists, and is loaded on first access."""
    import twostroke

    for name in twostroke.__all__:
        assert getattr(twostroke, name).__name__ == name or name == "Program"
    assert set(twostroke.__all__) <= set(dir(twostroke))
    with pytest.raises(AttributeError, match="has no attribute 'Fork'"):
        twostroke.Fork  # noqa: B018


def test_every_package_says_what_it_is() -> None:
    """In the docstring of its `__init__`, which is also required for its installation."""
    for directory in {path.parent for path in PACKAGE.rglob("*.py")}:
        assert ast.get_docstring(ast.parse((directory / "__init__.py").read_text())), directory


def test_only_the_command_bench_measures() -> None:
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if layer_of(path) != "study/bench"
        and any(module.startswith("twostroke.study.bench") for module in imports(path))
    }
    assert users == {"cli/bench.py", "cli/bench_serve.py"}
