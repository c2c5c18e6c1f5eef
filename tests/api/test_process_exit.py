"""A process that ends while other threads compute: its exit code is kept, and nothing else is printed."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.thinning import examples
from tests.tiny import write_model
from twostroke.backends.native.library import unavailable, variants

REPEATS = examples(1)
# One of the native variants: how a process ends is the same code for all of them.
BACKENDS = [*(f"native-{variant}" for variant in (() if unavailable() else variants()[:1])), "reference"]

# Prefills of long prompts, so that another thread is in a kernel nearly all of the time.
OPENING = """
import asyncio, atexit, gc, logging, os, signal, sys, threading, time
from twostroke import LLM, AsyncLLM
logging.disable(logging.WARNING)  # the weights are converted
options = dict(backend=sys.argv[2], kv_bytes=64 << 20, prefix_index="off", threads=2, max_step_tokens=256)
llm = LLM(sys.argv[1], **options)
prompt = [2 + i % 300 for i in range(1500)]
started = threading.Event()

def in_daemon(function):
    threading.Thread(target=function, daemon=True).start()
    started.wait(60)
    time.sleep(0.1)

def generate(model=llm):
    while True:
        started.set()
        model.generate([prompt], max_tokens=2, ignore_eos=True)
"""

WAYS = {
    "generate": """
in_daemon(generate)
sys.exit(3)
""",
    "two-threads": """
in_daemon(generate)
in_daemon(generate)
sys.exit(3)
""",
    "deleted-model": """
in_daemon(lambda model=llm: generate(model))
generate.__defaults__ = None
del llm
gc.collect()
sys.exit(3)
""",
    "decode": """
def decode():
    kv = llm.prefill(prompt[:20])
    while True:
        for _ in llm.decode(kv, max_tokens=500, ignore_eos=True):
            started.set()
in_daemon(decode)
sys.exit(3)
""",
    "logits": """
kv = llm.prefill(prompt[:20])
def read():
    while True:
        kv.tail.logits
        started.set()
in_daemon(read)
sys.exit(3)
""",
    "async-in-main": """
async def main():
    model = AsyncLLM(llm)
    task = asyncio.create_task(model.generate([prompt], max_tokens=200, ignore_eos=True))
    await asyncio.sleep(0.3)
    sys.exit(3)
asyncio.run(main())
""",
    "async-in-daemon": """
async def main():
    model = AsyncLLM(llm)
    while True:
        started.set()
        await model.generate([prompt], max_tokens=2, ignore_eos=True)
in_daemon(lambda: asyncio.run(main()))
sys.exit(3)
""",
    "exit-functions": """
def closes():
    llm.close()
    llm.close()
del llm  # `closes` was registered before the model was opened, and runs last
atexit.register(closes)
llm = LLM(sys.argv[1], **options)
generate.__defaults__ = (llm,)
in_daemon(generate)
atexit.register(lambda: llm.generate(["abc"], max_tokens=1))
sys.exit(3)
""",
    "closed-between-requests": """
def reads(model=llm):  # as a thread does that has one answer and comes to the next request
    while True:
        model.engine
        started.set()
in_daemon(reads)
atexit.register(time.sleep, 0.3)  # exit functions run in the opposite order
atexit.register(llm.close)
LLM(sys.argv[1], **options)  # the last model that was opened ends what all of them compute, before the others close
sys.exit(3)
""",
    "joined-late": """
from twostroke.errors import EngineStopped
from twostroke.system import process_exit
process_exit.STAY_S = 1.0  # the thread that is joined waits so long
def serve():
    try:
        generate()
    except EngineStopped:
        pass
thread = threading.Thread(target=serve, daemon=True)
del llm  # the join is registered before the model is opened, and runs last
atexit.register(lambda: thread.join())
llm = LLM(sys.argv[1], **options)
generate.__defaults__ = (llm,)
thread.start()
started.wait(60)
sys.exit(3)
""",
    "unread-decode": """
kv = llm.prefill(prompt[:20])
a = model = llm
g = model.decode(kv, max_tokens=20)
sys.exit(3)
""",
    "half-read-decode": """
class Holder: pass
holder = Holder()
holder.me, holder.llm, holder.g = holder, llm, llm.stream("abc", max_tokens=20, ignore_eos=True)
next(holder.g)
sys.exit(3)
""",
    "garbage-decode": """
class Holder: pass
holder = Holder()
holder.me, holder.llm, holder.g, holder.h = holder, llm, llm.stream("abc", max_tokens=20), llm.stream("abc")
next(holder.g)
generate.__defaults__ = None
del holder, llm
gc.collect()
sys.exit(3)
""",
}
ON_BOTH = ("generate", "async-in-daemon", "half-read-decode")  # each time; PyTorch takes seconds to import
ENDS = {
    "raise": ("raise LookupError('the end')", 1, "LookupError: the end"),
    "ctrl-c": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", -2, "KeyboardInterrupt"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that a step takes some milliseconds."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "max_position_embeddings": 4096}
    return write_model("mistral", tmp_path_factory.mktemp("exit"), **sizes)


@pytest.fixture(scope="module")
def run(model: Path) -> Callable[[str, str], tuple[int, str]]:
    def ran(backend: str, code: str) -> tuple[int, str]:
        ended = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", OPENING + code, str(model), backend],
            capture_output=True,
            text=True,
            timeout=240,
        )
        return ended.returncode, ended.stderr

    return ran


@pytest.mark.parametrize(
    ("backend", "way"),
    [
        pytest.param(backend, way, marks=[pytest.mark.nightly] if backend == "reference" and way not in ON_BOTH else [])
        for backend in BACKENDS
        for way in WAYS
    ],
)
def test_exit_code_is_kept_and_nothing_is_printed(
    run: Callable[[str, str], tuple[int, str]], backend: str, way: str
) -> None:
    for _ in range(REPEATS if backend != "reference" else 1):  # PyTorch takes seconds to import
        assert run(backend, WAYS[way]) == (3, "")


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_of_the_main_thread_are_the_last_line(
    run: Callable[[str, str], tuple[int, str]], backend: str, end: str
) -> None:
    code, expected, line = ENDS[end]
    for _ in range(REPEATS if backend != "reference" else 1):
        returned, printed = run(backend, "in_daemon(generate)\n" + code)
        assert (returned, printed.splitlines()[-1]) == (expected, line)
        assert "Fatal" not in printed
        assert "ignored" not in printed


def test_a_forked_child_ends_although_the_parent_was_computing(run: Callable[[str, str], tuple[int, str]]) -> None:
    code = """
in_daemon(generate)
if (child := os.fork()) == 0:
    sys.exit(4)
for _ in range(600):
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        break
    time.sleep(0.1)
else:
    os.kill(child, signal.SIGKILL)
sys.exit(os.waitstatus_to_exitcode(status) - 1)
"""
    assert run(BACKENDS[0], code)[0] == 3
