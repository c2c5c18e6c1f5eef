"""The attention window of each layer, in the forms in which checkpoints state it."""

from collections.abc import Callable

from twostroke.models.families.config_source import ConfigSource


def one_window(source: ConfigSource) -> tuple[int | None, ...]:
    """The window that a checkpoint states for all layers, if it states one."""
    window = source.integer("sliding_window") if source.get("sliding_window") else None
    return (window,) * source.num_layers


def windows_by_type(source: ConfigSource, otherwise: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Each layer's window, from config.json's `layer_types`; without them, layer i has a window if `otherwise(i)`."""
    layers, types = source.num_layers, source.get("layer_types")
    if types is None:
        sliding = [otherwise(i) for i in range(layers)]
    else:
        if not isinstance(types, list) or len(types) != layers:
            raise source.wrong("layer_types", f"a list of {layers}")
        if not all(kind in ("sliding_attention", "full_attention") for kind in types):
            raise source.unsupported("layer_types other than full_attention and sliding_attention")
        sliding = [kind == "sliding_attention" for kind in types]
    window = source.integer("sliding_window") if any(sliding) else None
    return tuple(window if slides else None for slides in sliding)


def windows_by_pattern(source: ConfigSource) -> tuple[int | None, ...]:
    """Each layer's window, from the pattern: a period whose last layer is global, or (GGUF) a list of booleans."""
    pattern = source.get("sliding_window_pattern")
    if isinstance(pattern, list):
        window = source.integer("sliding_window")
        if len(pattern) != source.num_layers:
            raise source.wrong("sliding_window_pattern", f"{source.num_layers} long")
        return tuple(window if slides else None for slides in pattern)
    if source.get("layer_types") is not None:
        return windows_by_type(source, lambda i: True)
    period = source.integer("sliding_window_pattern")
    return windows_by_type(source, lambda i: (i + 1) % period != 0)
