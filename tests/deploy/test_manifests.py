"""The files of `deploy/` are what their readers accept: Kubernetes, Dynamo, systemd, compose, and our own commands."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
GRAPH = yaml.safe_load((DEPLOY / "dynamo" / "graph.yaml").read_text())
COMPONENTS: list[dict[str, Any]] = GRAPH["spec"]["components"]
kubernetes = pytest.importorskip("kubernetes_validate")


def test_the_graph_has_the_fields_of_dynamos_schema() -> None:
    schema = json.loads((DEPLOY / "dynamo" / "schema.json").read_text())
    jsonschema.validate(GRAPH, schema)
    assert len({component["name"] for component in COMPONENTS}) == len(COMPONENTS)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(GRAPH | {"spec": GRAPH["spec"] | {"services": []}}, schema)


@pytest.mark.parametrize("component", COMPONENTS, ids=[component["name"] for component in COMPONENTS])
def test_pod_templates_are_kubernetes(component: dict[str, Any]) -> None:
    spec = component["podTemplate"]["spec"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": spec}
    kubernetes.validate(pod, kubernetes.latest_version(), strict=True)


def test_disruption_budgets_are_kubernetes_and_name_components_that_exist() -> None:
    budgets = list(yaml.safe_load_all((DEPLOY / "dynamo" / "budgets.yaml").read_text()))
    for budget in budgets:
        kubernetes.validate(budget, kubernetes.latest_version(), strict=True)
    chosen = {budget["spec"]["selector"]["matchLabels"]["nvidia.com/dynamo-component-type"] for budget in budgets}
    assert chosen == {component["type"] for component in COMPONENTS}


def test_workers_have_probes_that_fit_their_end() -> None:
    for component in COMPONENTS:
        spec = component["podTemplate"]["spec"]
        assert spec["terminationGracePeriodSeconds"] > 30
        if component["type"] != "frontend":
            (container,) = spec["containers"]
            assert {"livenessProbe", "readinessProbe", "startupProbe"} <= set(container)
            assert container["livenessProbe"] != container["readinessProbe"]
            assert container["args"][:2] == ["--role", component["type"]]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_is_a_unit(tmp_path: Path) -> None:
    """`systemd-analyze verify` knows every key; the program need not be installed for that."""
    unit = tmp_path / "twostroke.service"
    text = (DEPLOY / "systemd" / "twostroke.service").read_text()
    unit.write_text(text.replace("/opt/twostroke/bin/twostroke", shutil.which("true") or "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    about_us = [line for line in done.stderr.splitlines() if "twostroke.service" in line]
    assert not about_us


@pytest.mark.parametrize("file", ["systemd/serve.toml"])
def test_configuration_files_are_accepted(file: str, tmp_path: Path) -> None:
    """By the command itself; only the place of the disk tier is another one here."""
    text = (DEPLOY / file).read_text()
    assert tomllib.loads(text)
    config = tmp_path / "serve.toml"
    config.write_text(re.sub(r'kv_disk = ".*"', f'kv_disk = "{tmp_path / "kv"}"', text))
    command = [sys.executable, "-m", "twostroke", "serve", "--config", str(config), "--check-config"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "qwen2.5-coder-1.5b" in done.stdout + done.stderr


def test_variables_of_the_container_files_are_options() -> None:
    """A variable that no option has would be ignored without a word."""
    options = subprocess.run(
        [sys.executable, "-m", "twostroke", "serve", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "400", "PATH": "/usr/bin:/bin"},
    ).stdout
    known = set(re.findall(r"--([a-z-]+)", options))
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    names = set(compose["services"]["twostroke"]["environment"])
    assert names
    for name in names:
        assert name.removeprefix("TWOSTROKE_").lower().replace("_", "-") in known, name


def test_the_compose_file_waits_for_the_servers_end() -> None:
    service = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]["twostroke"]
    seconds = int(service["stop_grace_period"].removesuffix("s"))
    assert seconds >= int(service["environment"]["TWOSTROKE_DRAIN_DELAY"]) + 30 + 10
    assert service["ports"] == ["127.0.0.1:8000:8000"], "not open to the network by default"


def test_an_images_port_can_be_set_by_its_variable() -> None:
    """The health check asks at TWOSTROKE_PORT: a flag in the command would win over it at the server alone."""
    lines = (DEPLOY / "Containerfile").read_text().splitlines()
    (command,) = (line for line in lines if line.startswith("CMD"))
    assert "--port" not in command
