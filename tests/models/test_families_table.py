"""docs/families.md has a row for each family, which says what the code says."""

from collections.abc import Callable
from pathlib import Path

from tests.models.families_table import row_of
from tests.models.test_against_transformers import PAGE, stated
from tests.tiny import FAMILIES
from twostroke.models.checkpoints.huggingface.directory import open_huggingface


def test_a_row_for_each_family() -> None:
    assert list(stated(PAGE.read_text())) == list(FAMILIES)


def test_a_row_says_what_the_code_says(family: str, tiny_directory: Callable[[str], Path]) -> None:
    page = PAGE.read_text()
    config = open_huggingface(tiny_directory(family)).config
    assert row_of(family, config, stated(page)[family]) in page.splitlines(), (
        "`python -m tests.models.families_table` writes it"
    )
