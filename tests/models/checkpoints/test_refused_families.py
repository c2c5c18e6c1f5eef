"""Families that are known and not described are refused in one line that says what is missing, in both formats."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from twostroke.errors import CheckpointError, UnsupportedArchitecture
from twostroke.models.checkpoints.resolve import open_path
from twostroke.models.families import BY_GGUF, BY_MODEL_TYPE
from twostroke.models.families.missing import MISSING, reason


@pytest.mark.parametrize("name", MISSING)
def test_refused_in_one_line(name: str, tmp_path: Path) -> None:
    """A directory needs no weights for it, which may be hundreds of gigabytes."""
    directory, file = tmp_path / "a", tmp_path / "a.gguf"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": name, "hidden_size": 64}))
    writer = gguf.GGUFWriter(file, name)
    writer.add_tensor("token_embd.weight", np.zeros((32, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for path, where in ((directory, directory / "config.json"), (file, file)):
        with pytest.raises(UnsupportedArchitecture) as caught:
            open_path(path)
        told = str(caught.value)
        assert told.startswith(f"{where}: ")
        assert told.endswith(f"'{name}' {reason(name, '')}")
        assert " is not supported: it has " in told
        assert "\n" not in told


def test_what_is_described_is_not_refused() -> None:
    assert not MISSING.keys() & (BY_GGUF.keys() | BY_MODEL_TYPE.keys())


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("nemotron_h", {"hybrid_override_pattern": "M" * 100_000 + "*"}, "layers_block_type must be at most"),
        ("nemotron_h", {"hybrid_override_pattern": "M--*"}, "with an MLP that is first, or behind another"),
        ("nemotron_h", {"hybrid_override_pattern": "Mx"}, "layers_block_type other than"),
        ("falcon_h1", {"ssm_multipliers": [1, 2]}, "ssm_multipliers must be a list of 5 numbers"),
        ("falcon_h1", {"mamba_rms_norm": True}, "norms of Mamba-2 before its gate"),
        ("deepseek_v3", {"n_group": 8}, "topk_group must be some of 8 groups, with 3 of 8 experts"),
        ("deepseek_v3", {"topk_group": None}, "topk_group must be a positive integer"),
    ],
)
def test_variants_are_one_clear_error(
    family: str, change: dict[str, Any], said: str, tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny_directory(family), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises((CheckpointError, UnsupportedArchitecture), match=re.escape(said)) as caught:
        open_path(tmp_path)
    assert "\n" not in str(caught.value)
