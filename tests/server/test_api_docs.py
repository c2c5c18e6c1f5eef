"""`/docs` needs no other server, and shows what `/openapi.json` has."""

import re
from html import unescape

from tests.server.conftest import Serving


def test_docs_are_offline_and_whole(server: Serving) -> None:
    """Nothing is loaded, no script runs, and every path and field is there."""
    with server.http() as http:
        shown, description = http.get("/docs"), http.get("/openapi.json").json()
        assert http.get("/redoc").status_code == 404
        assert http.head("/docs").status_code == 200
    assert "default-src 'none'" in shown.headers["content-security-policy"]
    assert not re.search(r"https?://|<script|<link|@import|url\(", shown.text)
    text = unescape(shown.text)
    for path, methods in description["paths"].items():
        assert f"<code>{path}</code>" in text
        assert all(f"<b>{method.upper()}</b>" in text for method in methods)
    for field in ("cache_salt", "max_tokens", "messages", "stream"):
        assert f"<td><code>{field}</code>" in text
