"""What a process will take is compared with what it may take before anything is loaded."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.backends.ranks.processes import local_ranks
from twostroke.backends.reference.backend import ReferenceBackend
from twostroke.engine import memory_budget
from twostroke.engine.memory_budget import PROCESS_BYTES, MemoryBudget, workspace_bytes
from twostroke.engine.model_loader import ModelLoader
from twostroke.errors import InvalidRequest
from twostroke.models.checkpoints.resolve import open_checkpoint

MIB = 1 << 20
GROUPS = Path("/sys/fs/cgroup/memory")  # of version 1


def limit(monkeypatch: pytest.MonkeyPatch, available: int, group: int | None) -> None:
    monkeypatch.setattr(memory_budget, "machine_memory", lambda: available)
    monkeypatch.setattr(memory_budget, "group_memory", lambda: group)


def test_more_than_a_group_lets_is_refused_with_every_part(
    tiny_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 400 * MIB, 400 * MIB)
    with pytest.raises(InvalidRequest, match=r"take .*KV pool 2,048 MiB.*control group.*400 MiB: give"):
        tiny_llm(kv_bytes=2 << 30)


def test_more_than_the_machine_has_is_a_warning(
    tiny_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit(monkeypatch, 400 * MIB, None)
    with caplog.at_level(logging.WARNING):
        tiny_llm(kv_bytes=512 * MIB)
    assert any("this machine has 400 MiB" in record.getMessage() for record in caplog.records)


def test_the_default_pool_leaves_room_for_everything_else(
    tiny_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of what is free would be 25 MiB, and the process itself takes 96 of 100."""
    room = 100 * MIB
    limit(monkeypatch, room, room)
    llm = tiny_llm(kv_bytes=None)
    assert llm.memory.parts["KV pool"] == llm.pool.num_pages * llm.pool.page_bytes
    assert 0 <= llm.memory.left_bytes < room - PROCESS_BYTES - llm.memory.parts["KV pool"]


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(
    tiny_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 90 * MIB, 90 * MIB)
    with pytest.raises(InvalidRequest, match=r"take a smaller model"):
        tiny_llm()


def test_parts_add_up(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm(kv_bytes=4 << 20, kv_host=3 << 20, max_step_tokens=64)
    assert llm.memory.parts["KV in the host"] == 3 << 20
    assert llm.memory.parts["a step"] == workspace_bytes(llm.config, 64)
    assert llm.memory.left_bytes == llm.memory.limit_bytes - sum(llm.memory.parts.values())


def test_the_default_pool_leaves_room_for_the_weights_of_companions(
    tiny_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    ample = tiny_llm(student="int8", weights="bf16")
    needed = sum(size for what, size in ample.memory.parts.items() if what != "KV pool")
    limit(monkeypatch, (room := needed + 12 * ample.pool.page_bytes), room)
    assert tiny_llm(student="int8", weights="bf16", kv_bytes=None).pool.num_pages == 12


def test_ranks_of_other_hosts_hold_their_share(tiny_directory: Callable[[str], Path]) -> None:
    """Half of the ranks are here: so are half of the weights and of the pool, which may be twice what is left."""
    backend, checkpoint = ReferenceBackend(), open_checkpoint(str(tiny_directory("llama")))
    whole, half = MemoryBudget(64 << 20, True), MemoryBudget(64 << 20, True)
    ModelLoader(backend, "off", budget=whole).load_main(checkpoint, 16, 32 << 20)
    model = ModelLoader(backend, "off", budget=half, share=0.5).load_main(checkpoint, 16, None)
    assert half.parts["weights"] == whole.parts["weights"] // 2
    assert half.parts["KV pool"] == model.pool.num_pages * model.pool.page_bytes // 2
    assert 0 <= half.left_bytes < model.pool.page_bytes


def test_ranks_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_ranks(4) == 4, "without torchrun all ranks are here"
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert local_ranks(4) == 2


def test_no_limit_is_no_budget_of_zero() -> None:
    assert MemoryBudget.now().limit_bytes > 0


@pytest.fixture
def group() -> Iterator[Callable[[int], Path]]:
    """A function that makes a real control group with a limit, which a process joins by writing its id."""
    made = GROUPS / f"twostroke_test_{os.getpid()}"

    def make(size: int) -> Path:
        try:
            made.mkdir()
            (made / "memory.limit_in_bytes").write_text(str(size))
        except OSError as error:
            pytest.skip(f"no control groups of version 1 may be made here: {error}")
        return made

    yield make
    if made.exists():
        made.rmdir()


PROGRAM = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
from twostroke import LLM
from twostroke.errors import InvalidRequest
try:
    llm = LLM("smollm2-135m", **eval(sys.argv[2]))
except InvalidRequest as error:
    sys.exit(f"refused: {error}")
prompts = [f"{i} " + "word " * 700 for i in range(18)]
llm.generate(prompts, max_tokens=4)
print("served", llm.pool.num_pages * llm.pool.page_bytes >> 20)
"""


@pytest.mark.skipif(library.unavailable() is not None, reason="no native backend")
@pytest.mark.parametrize(
    ("size", "options", "outcome"),
    [(600, "dict(kv_bytes=2 << 30)", "refused"), (600, "{}", "served"), (200, "{}", "refused")],
)
def test_within_a_real_group(size: int, options: str, outcome: str, group: Callable[[int], Path]) -> None:
    """What is not refused is not killed at its peak either: 18 prompts of 700 words fill the pool."""
    place = group(size * MIB)
    command = [sys.executable, "-c", PROGRAM, str(place), options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode >= 0, f"killed by signal {-done.returncode}"
    said = (done.stdout + done.stderr).strip().splitlines()[-1]
    assert said.startswith(outcome), said
