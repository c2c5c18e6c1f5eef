"""JSON text without the numbers that JSON lacks: NaN and infinity become null (RFC 8259, section 6)."""

import json
import math
from collections.abc import Mapping
from typing import Any


def dumps(value: Any, **settings: Any) -> str:
    """As `json.dumps`, with null for NaN and infinity at any depth."""
    try:
        return json.dumps(value, allow_nan=False, **settings)
    except ValueError:
        return json.dumps(_without(value), allow_nan=False, **settings)


def _without(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without(one) for one in value]
    return value
