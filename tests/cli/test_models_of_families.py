"""`twostroke models show` has sensible figures for every family, from a directory and from a GGUF file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from tests.models.checkpoints.test_families_in_gguf import CONVERTED, convert
from tests.tiny import FAMILIES, LATENT, VOCAB, write_model
from twostroke.cli.model_facts import geometry_facts
from twostroke.models.checkpoints.gguf.opening import open_gguf
from twostroke.models.checkpoints.huggingface.directory import open_huggingface
from twostroke.models.families import BY_GGUF


@pytest.mark.parametrize("family", FAMILIES)
def test_show(
    family: str,
    run: Callable[..., Result],
    run_json: Callable[..., dict[str, Any]],
    tiny_directory: Callable[[str], Path],
) -> None:
    directory = tiny_directory(family)
    config = json.loads((directory / "config.json").read_text())
    config = config.get("text_config", config)
    facts = run_json("models", "show", str(directory))
    if family not in ("falcon_h1", "nemotron_h", "nemotron_h_moe"):  # a layer there is two here, or the half of one
        assert facts["layers"] == config["num_hidden_layers"]
    assert facts["hidden_size"] == config["hidden_size"]
    assert (facts["heads"], facts["vocab_size"]) == (config["num_attention_heads"], VOCAB)
    attentions = facts["layers"] - len(facts["recurrent_layers"])
    assert attentions > 0
    for kind in ("ropes", "head_shapes", "windows"):
        assert sum(one["layers"] for one in facts[kind]) == attentions, kind
    assert bool(facts["recurrent_layers"]) == (facts["state_bytes"] > 0)
    sizes = facts["kv_bytes_per_token"]
    assert 0 < sizes["bfloat16"] == sizes["float32"] // 2
    if family not in LATENT:  # whose entries have no codes
        assert 0 < sizes["k8v4"] < sizes["int8"] < sizes["bfloat16"]
    assert sum(file["bytes"] for file in facts["files"]) >= sum(one["bytes"] for one in facts["weights"].values())
    assert facts["parameters"] > 1000
    if facts["experts"]:
        assert 0 < facts["experts"]["chosen"] < facts["experts"]["count"]
    shown = run("models", "show", str(directory))
    assert shown.exit_code == 0
    assert facts["architecture"] in shown.stdout


@pytest.mark.parametrize("family", CONVERTED)
def test_a_gguf_file_has_the_same_figures(family: str, tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    made, family = CONVERTED[family], family.partition(",")[0]
    directory = write_model(family, tmp_path / "a", **made.sizes) if made.sizes else tiny_directory(family)
    theirs = geometry_facts(open_huggingface(directory))
    mine = geometry_facts(open_gguf(convert(directory, tmp_path / "a.gguf", made)))
    for facts in (mine, theirs):
        for rope in facts["ropes"]:
            rope["base"] = round(rope["base"])  # float32 in the file
    # Some families have no name of their own there.
    assert mine.pop("architecture") == BY_GGUF[made.arch].name
    assert {key for key in mine if mine[key] != theirs[key]} == set()
