"""One process prefills and another decodes, and either may be killed."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.wire.pairs import SECRET, SOON_S, local
from tests.cluster.wire.small import TRANSPORTS, nothing_is_held, soon
from twostroke.api.llm import LLM
from twostroke.cluster.wire import incoming_transfer
from twostroke.cluster.wire.channel import WireError
from twostroke.cluster.wire.handle import ValueHandle
from twostroke.cluster.wire.receiver import Receiver
from twostroke.cluster.wire.split_programs import SharedArrival, decode_program
from twostroke.cluster.wire.transport import open_transport
from twostroke.engine.request import Request
from twostroke.methods import Plain
from twostroke.methods.method import Prompt
from twostroke.sampling.params import SamplingParams

PROMPT = list(range(5, 65))  # four steps
OPTIONS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "seed": 3}


class Process:
    """The process that prefills."""

    def __init__(self, model: Path, kind: str) -> None:
        command = [sys.executable, "-m", "tests.cluster.wire.prefilling", str(model), kind, json.dumps(PROMPT)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **pipes)
        self.handle = ValueHandle.from_json(self.said())

    def said(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def step(self) -> bool:
        """Let it compute one chunk. Returns whether all is computed."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.said()["done"]

    def end(self) -> Any:
        """Let it end by itself. Returns what it says at last."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        said = self.said()
        assert self.process.wait(SOON_S) == 0
        return said

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SOON_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture(params=TRANSPORTS)
def both(
    request: pytest.FixtureRequest, tiny_llm: Callable[..., LLM], tiny_directory: Callable[[str], Path]
) -> Iterator[tuple[Process, LLM, Receiver]]:
    process = Process(tiny_directory("qwen3"), request.param)
    llm = tiny_llm("qwen3", weights="bf16", kv_bytes=4 << 20, prefix_index="off")
    transport = open_transport(request.param, llm.pool)
    receiver = Receiver(llm.pool, llm.model.id, secret=SECRET, transport=transport)
    yield process, llm, receiver
    process.kill()
    receiver.close()
    assert soon(lambda: llm.pool.num_used == 0)
    transport.close()


def decoding(llm: LLM, receiver: Receiver, handle: ValueHandle) -> Request:
    arrival, asked = SharedArrival(lambda: receiver.receive(handle)), Prompt(PROMPT, llm.tokenizer)
    params = SamplingParams(**OPTIONS)
    return Request(lambda: decode_program(Plain(), asked, arrival), params, llm.tokenizer)


def test_one_prefills_and_the_other_decodes(both: tuple[Process, LLM, Receiver]) -> None:
    process, llm, receiver = both
    request = llm.engine.submit(decoding(llm, receiver, process.handle))
    while not process.step():
        llm.engine.step()
        assert (llm.engine.num_running, llm.engine.num_arriving) == (0, 1)
    llm.engine.finish([request])
    assert list(request.events) == local(llm, PROMPT, **OPTIONS)
    assert process.end() == {"used": 0}


@pytest.mark.parametrize("steps", [0, 2, 4])
def test_the_one_that_prefills_is_killed(steps: int, both: tuple[Process, LLM, Receiver]) -> None:
    """Before, during and after its prefill."""
    process, llm, receiver = both
    request = llm.engine.submit(decoding(llm, receiver, process.handle))
    for step in range(steps):
        process.step()
        if step < 3:
            llm.engine.step()
            assert soon(lambda pages=step + 1: llm.pool.num_used == pages)
    if steps == 4:
        assert soon(lambda: request.choices[0].futures[0].future.done())
    process.kill()
    if steps == 4:  # it had sent all
        llm.engine.finish([request])
        assert list(request.events) == local(llm, PROMPT, **OPTIONS)
    else:
        with pytest.raises(WireError):
            llm.engine.finish([request])
    nothing_is_held(llm.pool)


def test_the_one_that_prefills_is_stopped_for_long(
    both: tuple[Process, LLM, Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is still being read then stays in quarantine until it goes on, or dies; all else is free at once."""
    process, llm, receiver = both
    monkeypatch.setattr(incoming_transfer, "STALL_S", 0.5)
    monkeypatch.setattr(incoming_transfer, "END_S", 0.1)
    incoming = receiver.receive(process.handle)
    process.step()
    assert soon(lambda: llm.pool.num_used == 1)
    process.process.send_signal(signal.SIGSTOP)
    with pytest.raises(WireError, match="does not answer"):
        incoming.result(SOON_S)
    assert receiver.num_quarantined == llm.pool.num_used
    process.process.send_signal(signal.SIGCONT)
    assert soon(lambda: receiver.num_quarantined == llm.pool.num_used == 0)
    assert process.end() == {"used": 0}
