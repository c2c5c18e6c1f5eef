"""Which layers have attention, and which a state: in GGUF files those without KV heads."""

from twostroke.models.families.config_source import ConfigSource

RECURRENT, FULL = "recurrent", "full_attention"
NAMES = {"full_attention": FULL, "attention": FULL} | dict.fromkeys(("conv", "mamba", "linear_attention"), RECURRENT)


def hybrid_kinds(source: ConfigSource, given: object) -> list[str]:
    """The kind of each layer, `RECURRENT` or `FULL`; `given`: config.json's list.

    Raises CheckpointError for a list of another length, UnsupportedArchitecture for other kinds.
    """
    if source.format == "gguf":
        heads = source.get("num_key_value_heads")
        given = ["attention" if count else "mamba" for count in heads] if isinstance(heads, list) else None
    if not isinstance(given, list) or len(given) != source.num_layers:
        raise source.wrong("num_key_value_heads" if source.format == "gguf" else "layer_types", "one for each layer")
    if not all(isinstance(kind, str) and kind in NAMES for kind in given):
        raise source.unsupported(f"layer_types other than {', '.join(NAMES)}")
    kinds = [NAMES[kind] for kind in given]
    if FULL not in kinds:
        raise source.unsupported("no layer of attention")
    return kinds


def kv_heads(source: ConfigSource) -> int | None:
    """The KV heads of the layers with attention, where the file has a list; None: the usual key says it."""
    counts = source.get("num_key_value_heads")
    own = {one for one in counts if one != 0} if isinstance(counts, list) else set()
    return next((one for one in own if type(one) is int and one > 0), None) if len(own) == 1 else None
