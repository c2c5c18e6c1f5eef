"""The pages of the repository name files, modules and sections that exist."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAB_BOOK = "docs/log.md"  # It names files as they were on the day of an entry.
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("docs/results/*.md"))]
NAMING_PAGES = [page for page in PAGES if page != ROOT / LAB_BOOK and page.name != "CHANGELOG.md"]
ROOMS = ["twostroke", "native", "tests", "benchmarks", "docs", "tools", "deploy", "clients"]
SUFFIXES = "py|h|cpp|md|toml|yaml|svg"
# Files that a reader or a command makes, and placeholders.
ELSEWHERE = {"mine.py", "twice.py", "prefill.py", "decode.py", "report.md", "org/name"}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose_of(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to headings: letters, digits, `_`, `-` and a hyphen for each space."""
    found = set[str]()
    for heading in re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")).strip().replace(" ", "-")
        count = sum(1 for other in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other))
        found.add(f"{slug}-{count}" if slug in found else slug)
    return found


@cache
def all_files() -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_sections(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}, and there is no such section"


def is_there(name: str, page: Path) -> bool:
    """Whether a name is a path from the page or the root, or the end of the path of a file."""
    if name in ELSEWHERE or (page.parent / name).exists() or (ROOT / name).exists():
        return True
    return any(file == name or file.endswith(f"/{name.rstrip('/')}") for file in all_files())


def paths_in(text: str) -> set[str]:
    """Names of files in backticks: with a suffix of ours, or with a folder of ours before a slash."""
    found = set[str]()
    for code in re.findall(r"`([^`\n]+)`", text):
        for name in re.findall(rf"(?<![\w$~/.{{-])[\w][\w./-]*\.(?:{SUFFIXES})(?![\w/*])", code):
            found.add(name)
        if re.fullmatch(r"[a-z_]+(?:/[\w]+)+/?", code):
            found.add(code)
    return found


@pytest.mark.parametrize("page", NAMING_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_paths_in_backticks_exist(page: Path) -> None:
    missing = sorted(name for name in paths_in(prose_of(page)) if not is_there(name, page) and "NAME" not in name)
    assert not missing, f"{page.name} names {missing}"


def is_module(name: str) -> bool:
    """Whether it is a module, or a name in one."""
    parent, last = ROOT.joinpath(*name.split(".")[:-1]), name.split(".")[-1]
    if (parent / last).is_dir() or (parent / f"{last}.py").exists():
        return True
    files = [parent.with_suffix(".py"), parent / "__init__.py"]
    return any(file.exists() and re.search(rf"\b{last}\b", text_of(file)) for file in files)


@pytest.mark.parametrize("page", NAMING_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_modules_exist(page: Path) -> None:
    """Names such as `twostroke.cluster.wire.sender`, also in the code and commands of the page."""
    text = text_of(page)
    named = set(re.findall(r"(?<![\w/.-])((?:twostroke|benchmarks|tests)(?:\.[A-Za-z_]\w*)+)(?![\w/-])", text))
    of_a_commit = {name for name in named if re.search(rf"{re.escape(name)}\b.{{0,60}} of commit", text)}
    missing = sorted(name for name in named - of_a_commit if not is_module(name))
    assert not missing, f"{page.name} names {missing}"


@pytest.mark.parametrize(
    ("page", "file"),
    [("adding-a-technique.md", "methods/reread.py"), ("adding-a-family.md", "models/families/qwen.py")],
)
def test_a_page_shows_the_class_of_its_file(page: str, file: str) -> None:
    shown = re.search(r"^class .*?(?=^```)", text_of(ROOT / "docs" / page), re.DOTALL | re.MULTILINE)
    assert shown is not None
    assert shown[0] in text_of(ROOT / "twostroke" / file)


@pytest.mark.parametrize("page", sorted({*ROOT.glob("docs/*.md")} - {ROOT / LAB_BOOK}), ids=lambda page: page.name)
def test_paragraphs_have_120_words_at_most(page: Path) -> None:
    lines = [line for line in prose_of(page).splitlines() if not line.startswith("|")]
    long = [f"{len(line.split())} words: {line[:60]}" for line in lines if len(line.split()) > 120]
    assert not long, f"{page.name} has {long}"


def test_the_architecture_has_4000_words_at_most() -> None:
    assert len(text_of(ROOT / "docs" / "architecture.md").split()) <= 4000
