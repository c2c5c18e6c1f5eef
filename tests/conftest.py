"""Shared fixtures: tiny random models of every family, and the smallest of the catalog for tests with a real model."""

import gc
import itertools
import os
import signal
from collections.abc import Callable, Generator, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import setuptools  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before distutils, for tests/software

# Before PyTorch is loaded: workers share the cores, and OpenMP's threads would spin on them between operators. A test
# with a real model takes five times as long with that.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# And before NumPy: of two workers, each with a thread for each core, most would spin. What tests expect takes a third.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():  # before anything imports Triton, which transformers does
    os.environ.setdefault("TRITON_INTERPRET", "1")

from httpx import _config as httpx_defaults  # pyright: ignore[reportPrivateUsage]
from hypothesis import HealthCheck, settings

from tests.kv.counts import check_counts
from tests.patience import PATIENCE_S
from tests.software import kernels
from tests.thinning import thin
from tests.tiny import FAMILIES, write_model
from twostroke.api.llm import LLM
from twostroke.engine import forecast
from twostroke.engine.calibration import calibrate
from twostroke.engine.model import Model
from twostroke.kv.pool import PagePool
from twostroke.models.checkpoints import resolve
from twostroke.models.checkpoints.catalog import CatalogEntry
from twostroke.models.checkpoints.fetch import fetch
from twostroke.models.step_predictor import StepPredictor
from twostroke.study.explain import explanation

# The longest files, more than half of the time. With `--no-loadscope-reorder` they begin first, so that at the end no
# worker waits long for another; pytest-xdist would begin with the files that have the most tests.
LONGEST = [
    "tests/engine/test_engine.py",
    "tests/backends/ranks/test_native.py",
    "tests/triton/test_backend.py",
    "tests/backends/ranks/test_distributed_ranks.py",
    "tests/backends/ranks/test_reference.py",
    "tests/methods/test_guesser.py",
    "tests/cli/test_serve.py",
    "tests/triton/test_recurrent.py",
    "tests/server/test_models.py",
    "tests/server/test_thoughts.py",
    "tests/engine/test_long_answers.py",
    "tests/api/test_process_exit.py",
    "tests/page/",  # one after the other, since a browser is of the folder
    "tests/triton/test_ranks.py",
    "tests/models/test_real_models.py",
    "tests/software/test_neon.py",
    "tests/chaos/test_chaos.py",
    "tests/models/test_against_transformers.py",
    "tests/study/plan/test_local_engine.py",
    "tests/triton/test_kv_bits.py",
    "tests/server/test_safety.py",
    "tests/test_threads.py",
    "tests/models/test_families_on_native.py",
    "tests/backends/test_native.py",
    "tests/kv/tiers/test_disk_kills.py",
    "tests/methods/test_tiers.py",
    "tests/backends/ranks/test_lost_ranks.py",
    "tests/cli/test_bench_serve.py",
    "tests/kv/test_algebra.py",
    "tests/cli/test_plan_load.py",
    "tests/cli/test_app.py",
    "tests/benchmarks/test_benchmarks.py",
    "tests/backends/test_sketch.py",
    "tests/cli/test_chat.py",
    "tests/server/test_openai.py",
    "tests/server/test_json_schema.py",
    "tests/engine/test_bias.py",
    "tests/methods/test_speculative.py",
]
PASSED = pytest.StashKey[bool]()
PagePool.max_elsewhere = 1 << 16  # to clear the books of a million pages takes a third of the time to open a model
MODULES = itertools.count(1)

# A busy machine must not fail a property, nor a client that leaves its patience to httpx, which has five seconds.
for what in ("connect", "read", "write", "pool"):
    setattr(httpx_defaults.DEFAULT_TIMEOUT_CONFIG, what, PATIENCE_S)
# What a client trusts is read once: it took 19 ms of processor time of each, and nearly none speaks TLS.
for library in filter(find_spec, ("httpx", "httpx2")):  # openai and anthropic may have the second
    transports: Any = import_module(f"{library}._transports.default")
    transports.create_ssl_context = cache(transports.create_ssl_context)
settings.register_profile("quiet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", settings.get_profile("quiet"), max_examples=1000)
settings.register_profile("software", settings.get_profile("quiet"), max_examples=50)
settings.load_profile("quiet")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", help="open tiny models on this device (cuda: the Triton backend)")
    parser.addoption("--software", metavar="VARIANTS", help="test kernels that this processor cannot run, in software")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background jobs inherit it, and Ctrl-C is tested
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if variants := config.getoption("--software"):
        kernels.install(config, variants.split(","))


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device"):
        items[:] = [item for item in items if item.get_closest_marker("reference") is None]
    thin(items)

    def place(item: pytest.Item) -> int:
        return next((i for i, begin in enumerate(LONGEST) if item.nodeid.startswith(begin)), len(LONGEST))

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What tests import stays. To look for garbage among it took a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def keep_what_is_there() -> None:
    """What is there stays, so that `gc.collect()` in a test need not visit it: a million objects take half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def garbage_of_modules() -> Iterator[None]:
    """What stayed for the tests of a file, such as its server, may have become garbage. Once in a while it is freed."""
    yield
    if next(MODULES) % 20 == 0:
        gc.unfreeze()
        keep_what_is_there()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Tells fixtures whether the test passed. The traceback of a failed test keeps all values of its frames."""
    if call.when == "call":
        item.stash[PASSED] = call.excinfo is None
    return (yield)


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A command that runs within a test, such as `serve`, may leave handlers that end the process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if handler is not None:  # else it was not set from Python
            signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def calibrated_once() -> Iterator[None]:
    """A model is timed once per process and number of threads, not each time that it is opened: that takes seconds."""
    taken: dict[tuple[object, ...], StepPredictor] = {}

    def calibrated(model: Model) -> StepPredictor:
        key = (model.id, model.backend.threads, model.pool.entry_bytes)
        if key not in taken:
            taken[key] = calibrate(model)
        return taken[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in (forecast, explanation):
            patch.setattr(module, "calibrate", calibrated)
        yield


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a family's name to the directory of its tiny model."""
    written: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in written:
            written[family] = write_model(family, tmp_path_factory.mktemp(family))
        return written[family]

    return get


@pytest.fixture(scope="session")
def native_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that kernels can run. A process that opens it does not import PyTorch, which takes two seconds."""
    return write_model("llama", tmp_path_factory.mktemp("native"), head_dim=64, num_attention_heads=2)


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tiny_llm(tiny_directory: Callable[[str], Path], request: pytest.FixtureRequest) -> Iterator[Callable[..., LLM]]:
    """A function that opens a tiny model; at the end of a test that passed, no model may have lost a page."""
    tiny_directory("llama")  # imports transformers, the first time
    keep_what_is_there()
    opened: list[LLM] = []

    def open_tiny(family: str = "llama", **options: Any) -> LLM:
        backend = "auto" if "weights" in options else "reference"  # float32, exactly
        chosen: dict[str, Any] = {"kv_bytes": 16 << 20, "threads": 1, "backend": backend} | options
        if (device := request.config.getoption("--device")) and chosen["backend"] in ("auto", "reference"):
            chosen |= {"backend": "triton", "device": device}
        llm = LLM(str(tiny_directory(family)), **chosen)
        opened.append(llm)
        return llm

    yield open_tiny
    if request.node.stash.get(PASSED, False):
        no_page_may_be_lost(opened)


def no_page_may_be_lost(opened: list[LLM]) -> None:
    """Raise AssertionError if a page is held outside of prefix indexes. The test's own values must be gone."""
    gc.collect()  # a caught exception and its frame form a cycle, which keeps the frame's values
    for llm in opened:
        assert (llm.engine.num_running, llm.engine.num_waiting) == (0, 0), "finish or cancel what the test began"
        models = llm.engine.models.values()
        for model in models:
            if model.index is not None:
                model.index.clear()
        for pool in {model.pool for model in models}:
            check_counts(pool, [])


@pytest.fixture(autouse=True)
def no_large_model_is_fetched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except in tests with the mark `models`: the default model has 1.1 GB, that of the tests 0.1."""

    def fetch_small(entry: CatalogEntry, **options: Any) -> Path:
        assert entry.size < 1 << 27, f"a test without the mark `models` asks for {entry.name}"
        return fetch(entry, **options)

    if request.node.get_closest_marker("models") is None:
        monkeypatch.setattr(resolve, "fetch", fetch_small)


@pytest.fixture(scope="session")
def smollm() -> LLM:
    """The smallest model of the catalog, a real one."""
    return LLM("smollm2-135m", backend="reference", kv_bytes=1 << 30)
