"""Predicted memory equals what the engine allocates, and printed commands start what they promise."""

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import typer
from typer.testing import CliRunner

from tests.cli.test_serve import address_of, wait_for
from tests.guesser import add_guesser
from tests.patience import PATIENCE_S
from tests.tiny import FAMILIES, write_model
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.backends.native.model import NativeModel
from twostroke.backends.reference.backend import ReferenceModel
from twostroke.cli.app import app
from twostroke.methods import method as method_of
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.sampling.params import SamplingParams
from twostroke.study.plan.local_engine import engine_memory
from twostroke.study.roofline.model_spec import ModelSpec
from twostroke.study.roofline.named_models import find_model
from twostroke.study.roofline.weight_formats import stored_format
from twostroke.study.simulate.engine_setup import kv_geometry

NATIVE = pytest.mark.skipif(library.unavailable() is not None, reason="no native backend")
PROMPT, OUTPUT = 64, 16
MACHINE = """
kind = "cpu"
memory_gb = {memory}
bandwidth_tbs = {bandwidth}
tflops = {{ bf16 = 1, int8 = 1 }}
compute = 1
memory = 1
"""


def held_tensors(model: ReferenceModel) -> list[torch.Tensor]:
    """Every tensor of a decoder, one that is used twice once."""
    found: dict[int, torch.Tensor] = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[value.data_ptr()] = value
        elif isinstance(value, list | tuple | dict):
            for one in value.values() if isinstance(value, dict) else value:
                visit(one)
        elif hasattr(value, "__dict__") and type(value).__module__.startswith("twostroke.backends.reference"):
            visit(list(vars(value).values()))

    visit(model.decoder)
    return list(found.values())


@NATIVE
@pytest.mark.parametrize(("weights", "kv_dtype"), [("bf16", "auto"), ("int8", "int8"), ("int4", "k8v4")])
@pytest.mark.parametrize("family", ["qwen3", "qwen3moe", "gemma3", "mistral", "qwen3_5", "lfm2", "granite4-hybrid"])
def test_predicted_is_allocated(
    family: str, weights: str, kv_dtype: str, tiny_llm: Callable[..., LLM], tiny_directory: Callable[[str], Path]
) -> None:
    """Native: packed matrices, vectors, and pages of bfloat16, or of codes with scales, which the plan counts too."""
    told = engine_memory(open_checkpoint(str(tiny_directory(family))), weights, kv_dtype=kv_dtype)
    llm = tiny_llm(family, weights=weights, kv_dtype=kv_dtype, kv_bytes=told.pool(3, 100))
    model = ModelSpec("tiny", llm.config).with_kv_bits({"int8": 8, "k8v4": 6}.get(kv_dtype, 16))
    assert model.kv_bytes(1) == llm.pool.entry_bytes
    assert kv_geometry(model).page_bytes(16) == told.page
    compiled: Any = llm.model.compiled
    assert isinstance(compiled, NativeModel)
    assert told.backend == llm.backend.name
    assert told.matrices == sum(matrix.nbytes for matrix in compiled.weights.matrices)
    assert told.vectors == sum(vector.nbytes for vector in compiled.weights.lent)
    assert told.page == llm.pool.page_bytes
    assert llm.pool.num_pages == 3 * told.pages(100)
    assert llm.pool.num_pages * llm.pool.page_bytes == told.pool(3, 100)


@pytest.mark.parametrize("family", FAMILIES)
def test_predicted_is_allocated_by_the_reference(
    family: str, tiny_llm: Callable[..., LLM], tiny_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every family, where the native kernels are not there."""
    monkeypatch.setattr(library, "unavailable", lambda: "they are not there")
    told = engine_memory(open_checkpoint(str(tiny_directory(family))))
    llm = tiny_llm(family, backend="reference", dtype="float32", kv_bytes=told.pool(3, 100))
    compiled: Any = llm.model.compiled
    assert told.backend == llm.backend.name
    assert told.matrices + told.vectors == sum(tensor.nbytes for tensor in held_tensors(compiled))
    assert told.page == llm.pool.page_bytes
    assert llm.pool.num_pages * llm.pool.page_bytes == told.pool(3, 100)


@NATIVE
def test_predicted_is_allocated_for_a_real_file() -> None:
    told = engine_memory(open_checkpoint("smollm2-135m"))
    with LLM("smollm2-135m", backend="native", kv_bytes=1 << 26, threads=1) as llm:
        compiled: Any = llm.model.compiled
        assert told.matrices == sum(matrix.nbytes for matrix in compiled.weights.matrices)


def test_a_file_is_planned_as_it_is_stored() -> None:
    """Bytes of its matrices, and 2 for each number of its vectors."""
    checkpoint = open_checkpoint("smollm2-135m")
    model = find_model("smollm2-135m").model
    matrices = sum(matrix.nbytes for matrix in checkpoint.matrices().values())
    assert stored_format(checkpoint).total(model) == matrices + 2 * model.other_parameters


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the native backend can run, stored in float32."""
    return write_model("llama", tmp_path_factory.mktemp("target"), head_dim=32)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("draft"), seed=1, head_dim=32, num_hidden_layers=1)


@pytest.fixture
def planned(target: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A function from options and a machine's numbers to what `plan --json` says of the tiny model."""

    def invoke(
        *options: object, memory: float = 1.0, bandwidth: float = 1.0, model: Path = target, prompt: int = PROMPT
    ) -> dict[str, Any]:
        machine = tmp_path / "machine.toml"
        machine.write_text(MACHINE.format(memory=memory, bandwidth=bandwidth))
        load = ["--prompt-tokens", prompt, "--output-tokens", OUTPUT]
        done = CliRunner().invoke(app, [*map(str, ["plan", model, "--on", machine, *load, *options, "--json"])])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    return invoke


def options_of(command: str) -> dict[str, Any]:
    """What a printed command sets, as `serve` reads it."""
    serve: Any = typer.main.get_command(app)
    words = shlex.split(command)
    assert words[:2] == ["twostroke", "serve"]
    return serve.commands["serve"].make_context("serve", words[2:]).params


METHODS = "plain repeat ptdo drop overfill refresh lookup speculative-student speculative-draft compress"


@pytest.mark.parametrize("method", METHODS.split())
def test_each_technique_runs_in_the_memory_that_is_planned(
    method: str, planned: Callable[..., dict[str, Any]], draft: Path
) -> None:
    """The printed options open the model, and three sequences run to their end without one preemption."""
    needs = ("--draft", draft) if method in ("speculative-draft", "compress") else ()
    run_as_planned(planned("--method", method, "--concurrency", 3, *needs)["engine"])


def test_a_model_s_own_head_runs_in_the_memory_that_is_planned(
    planned: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    model = add_guesser(write_model("qwen3_5", tmp_path / "model"))
    engine = planned("--method", "speculative-mtp", "--draft", "mtp", "--concurrency", 3, model=model)["engine"]
    assert options_of(engine["command"])["draft"] == "mtp"
    run_as_planned(engine)


def test_kv_of_8_bits_runs_in_the_memory_that_is_planned(planned: Callable[..., dict[str, Any]]) -> None:
    engine = planned("--kv-bits", 8, "--concurrency", 3)["engine"]
    assert options_of(engine["command"])["kv_dtype"] == "int8"
    run_as_planned(engine)


@pytest.mark.thinned
@NATIVE
@pytest.mark.parametrize("prompt", [64, 120, 250])
@pytest.mark.parametrize("method", ["plain", "ptdo", "drop", "refresh", "speculative-student"])
def test_states_have_room_in_the_memory_that_is_planned(
    method: str, prompt: int, planned: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    mamba = 6 * 64 * 32 + 3 * (2 * 2 * 64 + 6 * 32)
    for family, numbers in (("qwen3_5", 6 * 32 * 64 + 3 * 512), ("lfm2", 3 * 96), ("granite4-hybrid", mamba)):
        model = write_model(family, tmp_path / family)
        facts = planned("--method", method, "--concurrency", 3, model=model, prompt=prompt)
        assert facts["memory"]["snapshot_bytes"] == 3 * 4 * numbers
        run_as_planned(facts["engine"], prompt)


def run_as_planned(engine: dict[str, Any], prompt: int = PROMPT) -> None:
    options = options_of(engine["command"])
    names = ("model", "kv_bytes", "kv_dtype", "max_step_tokens", "weights", "student", "draft")
    parameters = dict(engine["method"])
    technique = method_of(parameters.pop("name", "plain"), **parameters)
    with LLM(**{name: options[name] for name in names}, threads=1, prefix_index="off") as llm:
        assert llm.pool.num_pages * llm.pool.page_bytes == engine["pool_bytes"]
        params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
        requests = [llm.request(range(one, one + prompt), params, technique) for one in range(3)]
        llm.engine.run(requests)
        assert [len(request.events) for request in requests] == [OUTPUT] * 3
        assert llm.engine.preemptions == 0


SERVED = [
    ({"bandwidth": 1e-6}, ("--itl-ms", 250), "int8 weights, int8 products"),
    ({"bandwidth": 1e-6}, ("--itl-ms", 90), "speculation by prompt lookup"),
]


@pytest.mark.parametrize(("machine", "options", "change"), SERVED)
def test_advised_commands_start(
    machine: dict[str, float], options: tuple[object, ...], change: str, planned: Callable[..., dict[str, Any]]
) -> None:
    """As processes, by the printed command with a port: each answers a request in the advised way, and ends."""
    facts = planned(*options, **machine)
    assert change in facts["ways_out"]["same_devices"]["changes"]
    advised = facts["engine"]["advised"]
    answer = started(advised["command"], advised["method"])
    assert answer["usage"]["completion_tokens"] == OUTPUT


def test_the_command_of_a_load_starts(planned: Callable[..., dict[str, Any]]) -> None:
    """It has room for more sequences than the mean."""
    facts = planned("--rate", 1, "--itl-ms", 250)
    command = facts["engine"]["command"]
    assert options_of(command)["max_running"] > facts["load"]["served"]["sequences"]
    answer = started(command, {})
    assert answer["usage"]["completion_tokens"] == OUTPUT


def started(command: str, method: dict[str, Any]) -> dict[str, Any]:
    """The answer of a server that a command starts."""
    words = [sys.executable, "-m", "twostroke", *shlex.split(command)[1:], "--port", "0", "--threads", "1"]
    body = {"prompt": "the quick", "max_tokens": OUTPUT, "ignore_eos": True} | ({"method": method} if method else {})
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            url, _ = address_of(process)
            wait_for(process, url, 200)
            return httpx.post(f"{url}/v1/completions", json=body).json()
        finally:
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, errors
