"""The layers in docs/architecture.md are the layers of the code."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "twostroke"
ALSO = {"session": "conversation", "__main__": "cli", "__init__": "llm"}  # files of one layer with another name


def layers() -> list[str]:
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(r"```layers\n(.*?)```", text, re.DOTALL)
    assert block is not None
    return [line.split()[0] for line in block[1].splitlines()]


def imports(path: Path) -> set[str]:
    """Every twostroke module that a file imports, inside functions too, but not for type checking only."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
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
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return ALSO.get(name, name)


def test_imports_point_down() -> None:
    order = {name: depth for depth, name in enumerate(layers())}
    assert {layer_of(path) for path in PACKAGE.rglob("*.py")} == set(order), "the page lists every layer, and no other"
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
    """Neither the package nor the command line loads torch before something runs."""
    code = "import sys, twostroke, twostroke.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
