"""Families that are known and not described are refused in one line that says what is missing, in both formats."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from twostroke.errors import UnsupportedArchitecture
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
