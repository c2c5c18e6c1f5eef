"""What kernels become on a GPU, as far as a compiler can tell without one."""

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, dict[str, int]]]:
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    run = [sys.executable, "-m", "tests.triton.model_cases"]
    return json.loads(subprocess.run(run, env=environment, check=True, capture_output=True, text=True).stdout)


def test_packed_weights_go_from_the_pipeline_to_the_tensor_cores(found: dict[str, dict[str, dict[str, int]]]) -> None:
    """Between their load and the product there is arithmetic alone: a move between threads would cost a barrier."""
    for name, made in found["packed weights"].items():
        assert made["products"] == 16, name  # of 16 columns each: the loop's 256 columns
        assert made["moves"] <= 1, name  # the result's, after the loop
        assert made["loads that wait"] == 0, name


def test_entries_in_codes_go_through_the_tensor_cores(found: dict[str, dict[str, dict[str, int]]]) -> None:
    assert set(found["coded entries"]) == {"attention", "store"}
    assert found["coded entries"]["attention"]["products"] == 2 * 12  # masked tiles and others


def test_layers_with_a_state_compile(found: dict[str, dict[str, dict[str, int]]]) -> None:
    """The interpreter takes what the compiler refuses: types that change in a loop."""
    assert set(found["states"]) == {"chunks", "convolution"}


def test_what_few_families_have_compiles(found: dict[str, dict[str, dict[str, int]]]) -> None:
    """Caps, norms over all heads, heads of two sizes, numbers of tokens, experts with factors and norms."""
    assert len(found["families"]) == 11


def test_products_and_sums_fuse_where_a_kernel_says_so(found: dict[str, dict[str, dict[str, int]]]) -> None:
    """Whatever the default of Triton's version is."""
    fused = {name for made in found.values() for name, one in made.items() if one["fused"]}
    assert {"attention", "chunks", "convolution", "wide heads, capped", "cap", "gate"} <= fused
    assert not fused & {
        "store",
        "whole norms",
        "values as keys",
        "squares",
        "scaled stream",
        "sums with norms",
        "inputs",
    }
