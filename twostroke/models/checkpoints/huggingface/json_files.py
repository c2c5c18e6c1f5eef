"""JSON objects in a checkpoint's directory. Nothing heavy is imported: the command line reads some early."""

import json
from pathlib import Path
from typing import Any

from twostroke.errors import CheckpointError


def read_optional(path: Path) -> dict[str, Any]:
    """The object in a file that may be missing; {} if it is. Raises CheckpointError."""
    return read_json(path) if path.is_file() else {}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return value
