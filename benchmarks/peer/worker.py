"""One engine with one model, answering jobs: `python -m benchmarks.peer.worker ADAPTER OPTIONS`.

It runs in the engine's environment, and waits for its turn in a read of stdin. Meanwhile it uses no processor time,
unless the engine's threads do.
"""

import os
import sys
import time
from importlib import import_module
from typing import Any

from benchmarks.peer.protocol import Adapter, Generated, Job, Options, Ready, from_line, to_line


def take_stdout() -> Any:
    """The protocol's stream. Engines print to stdout, even from C++, so stdout is redirected to the log like stderr."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stream


def check(job: Job, answer: Generated, elapsed: float) -> None:
    """Reject answers of an engine that stopped early or misread its clock. `elapsed` is measured by our clock."""
    wanted = [job.output_tokens] * len(job.prompts)
    counts = [len(tokens) for tokens in answer.tokens]
    stamps = [len(times) for times in answer.times]
    if not counts == stamps == wanted:
        raise RuntimeError(f"asked for {wanted} tokens, got {counts} and {stamps} times")
    for times in answer.times:
        if times[0] <= 0 or times != sorted(times):
            raise RuntimeError(f"times that do not go forward: {times[:4]} ...")
    last = max(times[-1] for times in answer.times)
    if not 0.9 * elapsed - 0.05 <= last <= elapsed:  # cleanup follows the last token
        raise RuntimeError(f"the last token came {last:.3f} s after the start, and the answer {elapsed:.3f} s")


def main(adapter_name: str, options_line: str) -> None:
    replies = take_stdout()
    began = time.perf_counter()
    adapter: Adapter = import_module(f"benchmarks.peer.adapters.{adapter_name}").load(
        Options(**from_line(options_line))
    )
    replies.write(to_line(Ready(adapter.version, time.perf_counter() - began)))
    replies.flush()
    for line in sys.stdin:
        job = Job(**from_line(line))
        began = time.perf_counter()
        answer = adapter.answer(job)
        check(job, answer, time.perf_counter() - began)
        replies.write(to_line(answer))
        replies.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
