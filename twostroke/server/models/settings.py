"""How several models share a server. Options of `twostroke serve` are made from this file."""

from dataclasses import dataclass

from twostroke.fields import Checked, flag, integer, number, size


@dataclass(frozen=True)
class SharingSettings(Checked):
    """Checked on construction (InvalidRequest names the field)."""

    models_bytes: int | None = size(
        None,
        least=1,
        unset="what the machine or the control group has left at start",
        help="Most memory that all loaded models may take; the one that was not used for longest leaves for another.",
    )
    max_loaded: int | None = integer(None, least=1, unset="no limit", help="Most models that are loaded at once.")
    manage_models: bool = flag(
        False,
        help="Let /api/pull fetch models of the catalog and /api/delete remove them; with limited keys, only keys with "
        "admin = true. All models that were fetched are served.",
    )
    unload_after_s: float = number(
        300.0, help="Seconds without a call after which a model is unloaded; below 0 for never. A call may set its own."
    )
