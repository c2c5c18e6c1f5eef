"""Requests in the shapes of a program that is not run here: they were written by hand."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

Event = dict[str, Any]


def replay(name: str) -> Iterator[tuple[str, list[Event]]]:
    """What each call is, and its answer: the events of a stream, or one object."""
    known = json.loads((Path(__file__).parent / "requests" / f"{name}.json").read_text())
    url, headers = os.environ["ANTHROPIC_BASE_URL"], known["headers"] | {"content-type": "application/json"}
    for call in known["calls"]:
        body = json.dumps({"model": os.environ["MODEL"], **call["body"]}).encode()
        with urlopen(Request(url + call["path"], body, headers), timeout=600) as answer:
            text = answer.read().decode()
        lines = [text] if not call["body"].get("stream") else text.split("data: ")[1:]
        yield call["what"], [json.loads(line.split("\n\n")[0]) for line in lines]
