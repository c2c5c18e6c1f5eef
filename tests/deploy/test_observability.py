"""Dashboards and alerts name metrics that a server has, and alert when they should."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from twostroke.api.llm import LLM
from twostroke.server.observability.metrics import Metrics, ServerMetrics
from twostroke.server.tenants.api_keys import ApiKeys

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana" / "twostroke.json").read_text())
OURS = re.compile(r"\b(?:twostroke_|process_)[a-z0-9_]+")


def exposition(llm: LLM) -> str:
    """What a server answers at `/metrics` before its first call."""

    async def answer() -> bytes:
        return bytes(ServerMetrics(ApiKeys()).exposition(Metrics(llm).exported, "").body)

    return asyncio.run(answer()).decode()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of every series that a server with a disk tier has before its first call."""
    from tests.tiny import write_model

    directory = write_model("llama", tmp_path_factory.mktemp("model"))
    with LLM(str(directory), kv_bytes=4 << 20, kv_disk=str(tmp_path_factory.mktemp("kv"))) as llm:
        lines = exposition(llm).splitlines()
    return {line.split("{")[0].split()[0] for line in lines if not line.startswith("#")}


def expressions() -> list[str]:
    rules = [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]
    return rules + [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_every_metric_that_is_named_exists(exported: set[str]) -> None:
    named = {name for expression in expressions() for name in OURS.findall(expression)}
    assert len(named) > 20
    assert named <= exported


def test_limits_of_histograms_are_limits_of_ours(
    tiny_llm: Callable[..., LLM],
) -> None:
    """An alert on a bucket that does not exist would be silent for ever."""
    body = exposition(tiny_llm())
    wanted = re.compile(r'(twostroke_\w+_bucket)\{[^}]*le="([^"]+)"')
    pairs = {pair for expression in expressions() for pair in wanted.findall(expression)}
    assert pairs
    for name, edge in pairs:
        assert re.search(rf'{name}{{[^}}]*le="{re.escape(edge)}"', body), (name, edge)


def test_every_alert_has_its_page_in_the_runbook() -> None:
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in (DEPLOY.parent / "docs" / "production.md").read_text().splitlines()
        if line.startswith("#")
    }
    alerts = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
    assert alerts
    for rule in alerts:
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert (page, anchor) == ("docs/production.md", rule["alert"].lower())
        assert anchor in headings, anchor


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_rules_alert_when_they_should() -> None:
    command = ["promtool", "test", "rules", str(DEPLOY / "prometheus" / "rules_test.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_panels_have_titles_units_and_places() -> None:
    places: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place: Any = panel["gridPos"]
        assert panel["title"]
        assert (place["x"], place["y"]) not in places
        places.add((place["x"], place["y"]))
