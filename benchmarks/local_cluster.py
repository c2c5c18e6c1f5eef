"""A cluster on one machine: Dynamo's front end and some workers as child processes, all of them on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from twostroke.cluster.environment import set_environment
from twostroke.errors import TwostrokeError

PATIENCE_S = 120.0


class ClusterFailed(TwostrokeError):
    """A process of the cluster has ended, or was not ready in time; names its log."""


def free_port() -> int:
    """A port of the loopback interface that nobody listens at now; below 32768, as Dynamo wants that of its metrics."""
    while True:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", random.randrange(20000, 32768)))
            return free.getsockname()[1]


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


class ClusterProcess:
    """A child process of the cluster, with a file for what it writes."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        self.name, self.log, self.port = name, log, free_port()
        environment = environment | {"DYN_SYSTEM_PORT": str(self.port)}
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, start_new_session=True
            )

    def metric(self, name: str, **labels: str) -> float:
        """A number of its Prometheus metrics. Raises KeyError if there is none of the name with these labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            for line in answer.read().decode().splitlines():
                series, _, value = line.rpartition(" ")
                known = all(f'{label}="{text}"' in series for label, text in labels.items())
                if series.partition("{")[0] == name and known:
                    return float(value)
        raise KeyError(name)

    def kill(self) -> None:
        """End it as a crash does."""
        self.process.kill()
        self.process.wait()

    def stop(self, patience_s: float = 30.0) -> int:
        """Ask it to end, and kill it if it does not. Returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class LocalCluster:
    """A context manager: inside of it, an OpenAI-compatible server is at `url`.

    Attributes:
        options: those of `twostroke worker` that every worker has.
        workers: in the order in which they were started.
        front_end: Dynamo's.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        *,
        migration_limit: int = 3,
        router: str = "round-robin",
        events: str | None = None,
    ) -> None:
        """Start the front end.

        Args:
            folder: takes logs, model cards and discovery.
            model: what clients call the model.
            migration_limit: how often a request may go to another worker.
            router: "round-robin", "kv", ...
            events: what carries KV events, as the router "kv" needs them: "zmq", which listens at all addresses of the
                machine, or "nats", a server.
        """
        self.folder, self.model = folder, model
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.options: list[str] = []
        self.workers: list[ClusterProcess] = []
        self._options = ["--migration-limit", str(migration_limit), "--router-mode", router]
        folder.mkdir(parents=True, exist_ok=True)
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
        if events is not None:
            self._environment["DYN_EVENT_PLANE"] = events
        self._environment["DYN_LOG"] = "info"  # with a line for each request, see `serving`
        set_environment(self._environment, "127.0.0.1", folder / "discovery")
        self.front_end = self._start_front_end()

    def _start_front_end(self) -> ClusterProcess:
        options = ["--namespace", "twostroke", "--http-port", str(self.port), *self._options]
        return self._member("front-end", ["-m", "dynamo.frontend", *options])

    def _member(self, name: str, arguments: Sequence[str]) -> ClusterProcess:
        return ClusterProcess(name, [sys.executable, *arguments], self.folder / f"{name}.log", self._environment)

    @property
    def running(self) -> list[ClusterProcess]:
        return [worker for worker in self.workers if worker.process.poll() is None]

    def add(self, *options: str) -> ClusterProcess:
        """Start a worker with these options besides. `ready` waits for it."""
        name = f"worker-{len(self.workers)}"
        own = ["--served-name", self.model, "--cards", str(self.folder / "cards")]
        arguments = ["-m", "twostroke", "worker", *own, *self.options, *options]
        self.workers.append(self._member(name, arguments))
        return self.workers[-1]

    def serving(self, id: str) -> ClusterProcess:
        """The worker that has the request, by the id of its completion. Raises ClusterFailed."""
        request = id.partition("-")[2]
        for worker in reversed(self.running):
            if request in worker.log.read_text(errors="replace"):
                return worker
        raise ClusterFailed(f"no worker has request {request}: see {self.folder}")

    def restart_front_end(self) -> None:
        """As after a crash of the front end."""
        self.front_end.kill()
        self.front_end = self._start_front_end()

    def ready(self, patience_s: float = PATIENCE_S, *, forgotten: bool = False) -> None:
        """Wait until the front end knows every worker that runs, and has `forgotten` the dead. Raises ClusterFailed."""
        deadline = time.monotonic() + patience_s
        known = (None, 0, -signal.SIGKILL)  # it runs, or was ended on purpose
        while True:
            for member in (self.front_end, *self.workers):
                if member.process.poll() not in known:
                    raise ClusterFailed(f"{member.name} has ended: see {member.log}")
            if self._answers(forgotten):
                return
            if time.monotonic() > deadline:
                raise ClusterFailed(f"the cluster was not ready in {patience_s:.0f} s: see {self.folder}")
            time.sleep(0.1)

    def _answers(self, forgotten: bool) -> bool:
        try:
            instances, models = self.health()["instances"], self._get("/v1/models")["data"]
        except OSError:
            return False
        addresses = [instance["transport"]["tcp"] for instance in instances if instance["endpoint"] == "generate"]
        known = sum(_listens(address.partition("/")[0]) for address in addresses)  # a dead one is known for a while
        if forgotten and known < len(addresses):
            return False
        return known >= len(self.running) and any(model["id"] == self.model for model in models)

    def health(self) -> Any:
        """The front end's own report: which workers it knows. Raises OSError."""
        return self._get("/health")

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=5) as answer:
            return json.load(answer)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for member in (*self.workers, self.front_end):
            if member.process.poll() is None:
                member.process.send_signal(signal.SIGTERM)
        for member in (*self.workers, self.front_end):
            member.stop()
