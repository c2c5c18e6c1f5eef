"""The outside programs of `make test-clients`: each is pinned, and in the table."""

from pathlib import Path

import pytest

from clients.run import FOLDER, TABLE, Client, read, table
from twostroke.models.checkpoints.catalog import CATALOG

CLIENTS = [read(path) for path in sorted(FOLDER.glob("try_*.py"))]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_is_pinned_and_in_the_table(client: Client) -> None:
    assert all("==" in requirement for requirement in client.requirements)
    assert client.model in CATALOG
    assert f"| {client.title} | {client.model} | {client.tried} | " in TABLE.read_text()


def test_the_table_says_why_a_client_fails() -> None:
    client = Client(Path("try_some.py"), ("some==1",), "smollm2-135m", "some 1", "Chat.")
    assert table([client], {"some": ""}).endswith("| some 1 | smollm2-135m | Chat. | passes |\n")
    assert table([client], {"some": "no route"}).endswith("| Chat. | no route |\n")
