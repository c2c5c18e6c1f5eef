"""Which layers have attention, and which a state: in GGUF files those without KV heads."""

from collections.abc import Sequence

from twostroke.models.families.config_source import ConfigSource

RECURRENT, FULL = "recurrent", "full_attention"
NAMES = (FULL, "attention", "conv", "mamba", "linear_attention")


def hybrid_kinds(source: ConfigSource, given: object) -> list[str]:
    """The kind of each layer, by its KV heads in GGUF files, else by config.json's list, `given`."""
    if source.format == "huggingface":
        return checked_kinds(source, "layer_types", given)
    heads = source.get("num_key_value_heads")
    given = ["attention" if count else "mamba" for count in heads] if isinstance(heads, list) else None
    return checked_kinds(source, "num_key_value_heads", given)


def checked_kinds(source: ConfigSource, key: str, given: object, names: Sequence[str] = NAMES) -> list[str]:
    """The kind of each layer, `RECURRENT` or `FULL`, from a list of some of `names`.

    Raises CheckpointError for a list of another length, UnsupportedArchitecture for other kinds.
    """
    if not isinstance(given, list) or len(given) != source.num_layers:
        raise source.wrong(key, "one for each layer")
    if not all(isinstance(kind, str) and kind in names for kind in given):
        raise source.unsupported(f"layer_types other than {' and '.join(names)}")
    kinds = [FULL if kind in (FULL, "attention") else RECURRENT for kind in given]
    if FULL not in kinds:
        raise source.unsupported("no layer of attention")
    return kinds


def kv_heads(source: ConfigSource) -> int | None:
    """The KV heads of the layers with attention, where the file has a list; None: the usual key says it."""
    counts = source.get("num_key_value_heads")
    own = {one for one in counts if one != 0} if isinstance(counts, list) else set()
    return next((one for one in own if type(one) is int and one > 0), None) if len(own) == 1 else None
