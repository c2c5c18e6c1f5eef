"""The harness side of a worker process."""

from __future__ import annotations

import json
import subprocess
import threading
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from benchmarks.peer.engines import Engine
from benchmarks.peer.environments import environment, last_words, log_file, python
from benchmarks.peer.processes import await_end, cpu_seconds, peak_rss_bytes, tree
from benchmarks.peer.protocol import Generated, Job, Options, Ready, from_line, to_line

PATIENCE_S = 1800.0  # vLLM compiles for minutes the first time, and 8,000 tokens take minutes in other engines


class WorkerFailed(Exception):
    """A worker ended, or was silent for too long; the message is one line."""


class Worker:
    """An engine with a model loaded, in a separate process."""

    def __init__(self, engine: Engine, options: Options, work: Path) -> None:
        self.engine = engine
        self._log = log_file(work, f"worker-{engine.name}")
        command = [str(python(engine, work)), "-m", "benchmarks.peer.worker", engine.adapter]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [*command, json.dumps(asdict(options))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment(engine.variables(options.threads, str(work), amx=options.amx)),
                cwd=work,
            )
        try:
            self.ready = Ready(**from_line(self._reply()))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def answer(self, job: Job) -> Generated:
        """Raises WorkerFailed."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(to_line(job))
            stdin.flush()
        except OSError:
            raise WorkerFailed(self._why()) from None
        return Generated(**from_line(self._reply()))

    def cpu_seconds(self) -> float:
        return cpu_seconds(tree(self._process.pid))

    def peak_rss_bytes(self) -> int:
        return peak_rss_bytes(tree(self._process.pid))

    def close(self) -> None:
        """Close the worker's input, which ends it; kill it if it does not end."""
        pids = tree(self._process.pid)
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        await_end(pids[1:])

    def _reply(self) -> str:
        stdout = self._process.stdout
        assert stdout is not None
        timer = threading.Timer(PATIENCE_S, self._process.kill)
        timer.start()
        try:
            line = stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise WorkerFailed(self._why())
        return line

    def _why(self) -> str:
        """Why the worker closed its output. It is ending, or is killed."""
        try:
            status = self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        return f"{last_words(self._log) or 'it ended'} (exit status {status}; more in {self._log.name})"
