"""A program: Ctrl-C comes to the main thread at random moments, many times, while other threads do the same.

It is a process of its own, since a signal that comes a moment late would end the run of all tests. It fails where
another thread gets something else than alone, waits for ever, or the signal is lost.

Arguments: `turns`, or `llm` with a model's directory, a backend and its weights.
"""

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from twostroke import LLM
from twostroke.engine.concurrency import LeaderFollower

PROMPTS = [[5 + i, 9, 17 + i, 3, 40 + i, 8] * (1 + i % 4) for i in range(4)]
OTHERS = 3  # threads that are not interrupted
LIMIT_S = 60.0


def press(act: Callable[[], object], work: Callable[[int], object], presses: int, within_s: float) -> None:
    """Call `act` again and again in this thread, each time until Ctrl-C, and `work(i)` in other threads.

    After each Ctrl-C every other thread must get on. `within_s` is the longest time from the call to the signal.
    """
    armed: SimpleQueue[bool] = SimpleQueue()  # not an Event, whose lock a Ctrl-C may leave held
    stop, rounds, failures = threading.Event(), [0] * OTHERS, list[BaseException]()

    def other(i: int) -> None:
        try:
            while not stop.is_set():
                work(i)
                rounds[i] += 1
        except BaseException as error:
            failures.append(error)
            raise

    def send() -> None:
        delays = random.Random(1)
        while armed.get():
            time.sleep(delays.random() * within_s)
            os.kill(os.getpid(), signal.SIGINT)

    def wait() -> None:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            act()

    def interrupted() -> bool:
        """Whether the signal was seen: Python drops one that comes while a finalizer runs."""
        try:
            armed.put(True)
            wait()  # in CPython 3.13 a `try` does not cover the way back to the start of a loop in it
        except KeyboardInterrupt:
            return True
        return False

    threads = [threading.Thread(target=other, args=(i,), daemon=True) for i in range(OTHERS)]
    threads.append(threading.Thread(target=send, daemon=True))
    for thread in threads:
        thread.start()
    seen = 0
    for _ in range(presses):
        seen += interrupted()
        before, until = list(rounds), time.monotonic() + LIMIT_S
        while any(now == then for now, then in zip(rounds, before, strict=True)):
            assert not failures, failures
            assert time.monotonic() < until, "threads wait for a lock that stays held"
            time.sleep(1e-4)
    stop.set()
    armed.put(False)
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures, failures
    assert seen > 0.8 * presses, f"{seen} of {presses} signals were seen"


def in_turns() -> None:
    """Threads that wait for each other, switched at nearly every moment."""
    turns = LeaderFollower()

    def turn(_: int = 0) -> None:
        answers = iter((False, True))
        turns.notify()
        turns.wait(lambda: next(answers, True), lambda _: True, lambda: 1e-3)

    sys.setswitchinterval(1e-5)
    press(turn, turn, 60, 1e-3)


def with_a_model(directory: str, backend: str, weights: str) -> None:
    """Threads that ask one model. Cut in two, a step would leave requests of other threads without an end."""
    with LLM(directory, backend=backend, weights=weights, kv_bytes=4 << 20) as llm:

        def answers(i: int) -> list[int]:
            return [token.id for token in llm.generate([PROMPTS[i]], max_tokens=20, ignore_eos=True)[0].tokens]

        alone = [answers(i) for i in range(OTHERS)]

        def work(i: int) -> None:
            assert answers(i) == alone[i]

        presses = 100 if backend == "native" else 30  # the threads are the same, and PyTorch is slow
        press(lambda: llm.generate([PROMPTS[3]], max_tokens=50, ignore_eos=True), work, presses, 0.01)
        assert llm.engine.num_running == llm.engine.num_waiting == 0
        assert llm.model.index is not None
        llm.model.index.clear()
        gc.collect()
        assert llm.pool.num_held == 0
        assert llm.pool.num_free == llm.pool.num_pages


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    {"turns": in_turns, "llm": with_a_model}[sys.argv[1]](*sys.argv[2:])
