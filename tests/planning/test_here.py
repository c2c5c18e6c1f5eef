"""Predicted memory equals what the engine allocates, and printed commands parse."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from twostroke.backends.native import library
from twostroke.backends.native.compiled import NativeModel
from twostroke.backends.native.weights import FORMATS
from twostroke.checkpoints.resolve import open_checkpoint
from twostroke.cli.app import app
from twostroke.llm import LLM
from twostroke.planning.here import engine_memory, serve_command, stored_format
from twostroke.planning.models import find_model

NATIVE = pytest.mark.skipif(library.unavailable() is not None, reason="no native backend")


@NATIVE
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3moe", "gemma3", "mistral"])
def test_predicted_is_allocated(
    family: str, weights: str, tiny_llm: Callable[..., LLM], tiny_directory: Callable[[str], Path]
) -> None:
    told = engine_memory(open_checkpoint(str(tiny_directory(family))), FORMATS, weights)
    llm = tiny_llm(family, weights=weights, backend="native", kv_bytes=told.pool(3, 100))
    compiled: Any = llm.model.compiled
    assert isinstance(compiled, NativeModel)
    assert told.matrices == sum(matrix.nbytes for matrix in compiled.matrices)
    assert told.vectors == sum(vector.nbytes for vector in compiled.lent)
    assert told.page == llm.pool.page_bytes
    assert llm.pool.num_pages == 3 * told.pages(100)
    assert llm.pool.memory.storage.nbytes == told.pool(3, 100)


@NATIVE
def test_predicted_is_allocated_for_a_real_file() -> None:
    told = engine_memory(open_checkpoint("smollm2-135m"), FORMATS)
    with LLM("smollm2-135m", backend="native", kv_bytes=1 << 26, threads=1) as llm:
        compiled: Any = llm.model.compiled
        assert told.matrices == sum(matrix.nbytes for matrix in compiled.matrices)


def test_a_file_is_planned_as_it_is_stored() -> None:
    """Bytes of its matrices, and 2 for each number of its vectors."""
    checkpoint = open_checkpoint("smollm2-135m")
    model = find_model("smollm2-135m").model
    matrices = sum(matrix.nbytes for matrix in checkpoint.matrices().values())
    assert stored_format(checkpoint).total(model) == matrices + 2 * model.other_parameters


def test_printed_commands_parse() -> None:
    serve: Any = typer.main.get_command(app)
    for weights, itl in (("stored", None), ("int4", 50.0)):
        arguments = serve_command("smollm2-135m", weights, 1 << 20, 4, itl)[2:]
        assert serve.commands["serve"].make_context("serve", arguments).params["model"] == "smollm2-135m"
