"""One word, one meaning: what a reader may rely on when searching the package for a name."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "twostroke"
LIMIT = re.compile(r"(MOST|LEAST|FEWEST|LONGEST|LARGEST|SMALLEST)(_|$)")  # `MAX_` and `MIN_` name limits here
GLOSSARY_TERMS = 35


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def test_no_class_name_twice() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file}:{node.lineno}")
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_limits_are_called_max_and_min() -> None:
    found = [
        f"{file}:{target.lineno} {target.id}"
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in ([node.target] if isinstance(node, ast.AnnAssign) else node.targets)
        if isinstance(target, ast.Name) and LIMIT.match(target.id.lstrip("_"))
    ]
    assert not found


def test_the_glossary_is_short() -> None:
    text = (PACKAGE.parent / "docs" / "glossary.md").read_text()
    assert len(re.findall(r"^- \*\*", text, re.MULTILINE)) <= GLOSSARY_TERMS
