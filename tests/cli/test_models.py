"""`twostroke models`: the catalog, and the description of a model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from twostroke.api.llm import LLM
from twostroke.models.checkpoints.catalog import CATALOG
from twostroke.models.formats.tensor import RawTensor


def test_list(run: Callable[..., Result], run_json: Callable[..., dict[str, Any]]) -> None:
    models = {model["name"]: model for model in run_json("models", "list")["models"]}
    assert list(models) == list(CATALOG)
    assert models["smollm2-135m"]["size"] == 98_362_432
    assert {"licence", "fetched", "chat", "sources", "path"} <= set(models["smollm2-135m"])
    text = run("models", "list").stdout
    assert all(name in text for name in CATALOG)


def test_pull_of_a_path_is_already_there(run_json: Callable[..., dict[str, Any]], tiny: str) -> None:
    facts = run_json("models", "pull", tiny)
    assert facts["bytes"] == sum(file["bytes"] for file in facts["files"]) > 0


def test_show(
    run: Callable[..., Result],
    run_json: Callable[..., dict[str, Any]],
    tiny_directory: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = str(tiny_directory("gemma3"))
    llm = LLM(directory, backend="reference")
    monkeypatch.setattr(RawTensor, "dequantize", lambda *_: pytest.fail("the weights were loaded"))
    facts = run_json("models", "show", directory)
    assert (facts["layers"], facts["hidden_size"], facts["heads"], facts["kv_heads"], facts["head_dim"]) == (
        7,
        64,
        4,
        2,
        32,
    )
    wide, heads = llm.pool.entry_bytes, llm.config.num_layers * 2 * llm.config.num_kv_heads
    scaled = {"int8": wide // 4 + 4 * heads, "k8v4": wide // 4 * 3 // 4 + 4 * heads}  # a scale for each head
    assert facts["kv_bytes_per_token"] == {"float32": wide, "bfloat16": wide // 2} | scaled
    assert {one["window"]: one["layers"] for one in facts["windows"]} == {24: 6, None: 1}
    assert facts["parameters"] == sum(t.numel() for t in parameters(directory))
    assert facts["weights"]["F32"]["bytes"] == 4 * facts["parameters"]
    assert facts["tokenizer"]["kind"] == "BPE"
    assert facts["tokenizer"]["eos_tokens"] == ["</s>"]
    assert facts["tokenizer"]["chat_template"].startswith("{% for")
    assert facts["files"][0]["bytes"] > 0
    assert len(facts["weights_id"]) == 32
    text = run("models", "show", directory).stdout
    for word in (
        "architecture",
        "KV per token",
        "weights id",
        "weights in F32",
        "parameters",
        "window 24 in 6 layers",
        "</s> (1)",
        "no defaults stated",
    ):
        assert word in text


def parameters(directory: str) -> list[Any]:
    from safetensors.torch import load_file

    return list(load_file(Path(directory) / "model.safetensors").values())


def test_show_of_layers_that_differ_in_heads(
    run: Callable[..., Result], run_json: Callable[..., dict[str, Any]], tiny_directory: Callable[[str], Path]
) -> None:
    shown = " ".join(run("models", "show", str(tiny_directory("gemma4-12b"))).stdout.split())
    assert "heads 6 kv heads 2 in 2 layers; 1 in 2 layers head dim 32 in 2 layers; 64 in 2 layers" in shown
    assert "RoPE base 10,000 in 2 layers; base 1,000,000, 16 of 64 numbers in 2 layers" in shown
    assert "experts 5 in 3 layers, 3 for a token" in " ".join(
        run("models", "show", str(tiny_directory("gpt_oss"))).stdout.split()
    )
    shapes = run_json("models", "show", str(tiny_directory("gemma4")))["head_shapes"]
    assert shapes == [
        {"heads": 4, "kv_heads": 2, "head_dim": 32, "layers": 3},
        {"heads": 4, "kv_heads": 2, "head_dim": 64, "layers": 3},
    ]


def test_show_of_layers_without_rope_and_with_a_part_of_it(
    run: Callable[..., Result], run_json: Callable[..., dict[str, Any]], tiny_directory: Callable[[str], Path]
) -> None:
    some, part = str(tiny_directory("smollm3")), str(tiny_directory("glm4"))
    assert [(one["rotated"], one["layers"]) for one in run_json("models", "show", some)["ropes"]] == [(16, 3), (0, 2)]
    assert "base 2,000,000 in 3 layers; none in 2 layers" in " ".join(run("models", "show", some).stdout.split())
    assert "base 10,000, 16 of 32 numbers" in " ".join(run("models", "show", part).stdout.split())


def test_show_of_a_catalog_model(run_json: Callable[..., dict[str, Any]]) -> None:
    facts = run_json("models", "show", "smollm2-135m")
    assert facts["layers"] == 30
    assert facts["tokenizer"]["kind"] == "gpt2"
    assert facts["catalog"]["fetched"] is True
    assert facts["parameters"] == 134_515_008
    assert facts["generation"] == {"temperature": 0.2, "top_p": 0.9}


def test_show_of_a_model_not_fetched(
    run: Callable[..., Result],
    run_json: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path))
    facts = run_json("models", "show", "smollm2-135m")
    assert facts["catalog"]["fetched"] is False
    assert "layers" not in facts
    assert "models pull smollm2-135m" in run("models", "show", "smollm2-135m").stdout


@pytest.mark.parametrize("command", ["pull", "show"])
def test_unknown_models(run: Callable[..., Result], command: str) -> None:
    result = run("models", command, "smollm")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: unknown model")
    assert result.stderr.count("\n") == 1
