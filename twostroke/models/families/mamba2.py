"""Layers of Mamba-2, as checkpoints of several families have them: their sizes, and where their numbers are in a file.

A file has z, v, k, q and a in one matrix, in this order, and v, k and q in the convolution. Ours have q and k first.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import numpy as np

from twostroke.models.config import ModelConfig
from twostroke.models.families.config_source import MAX_COUNT, ConfigSource
from twostroke.models.families.family import Family, Transform
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.recurrent import Mamba2, RecurrentMixer

PROJECTIONS = ("state_q", "state_k", "state_v", "state_z", "state_a")
MAMBA2_GGUF_KEYS = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_inner_size": "ssm.inner_size",
}
MAMBA2_GGUF = dict.fromkeys(PROJECTIONS, "ssm_in.weight") | {
    "conv": "ssm_conv1d.weight",
    "conv_bias": "ssm_conv1d.bias",
    "decay": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "skip": "ssm_d",
    "state_norm": "ssm_norm.weight",
    "state_o": "ssm_out.weight",
}


def mamba2_parts(prefix: str) -> dict[str, str]:
    """The names of a layer's tensors in a directory."""
    names = {"conv": "conv1d.weight", "conv_bias": "conv1d.bias", "decay": "A_log", "dt_bias": "dt_bias", "skip": "D"}
    names |= {"state_norm": "norm.weight", "state_o": "out_proj.weight"} | dict.fromkeys(PROJECTIONS, "in_proj.weight")
    return {ours: f"{prefix}.{theirs}" for ours, theirs in names.items()}


def mamba2_of(
    source: ConfigSource, names: Mapping[str, str] = MappingProxyType({}), inner: int | None = None, normed: bool = True
) -> Mamba2:
    """The layers; `names`: keys that have others in config.json, `inner`: the heads' numbers there, if it is stated.

    Raises CheckpointError if heads do not fit, UnsupportedArchitecture for steps with limits.
    """

    def size(key: str, limit: int = MAX_COUNT) -> int:
        return source.integer(names.get(key, key), limit=limit)

    if source.get("mamba_proj_bias") or source.get(names.get("mamba_conv_bias", "mamba_conv_bias")) is False:
        raise source.unsupported("biases of Mamba's projections, or none of its convolution")
    if _limits(source.get("time_step_limit")):
        raise source.unsupported("time_step_limit")
    heads, groups = size("mamba_n_heads"), size("mamba_n_groups")
    if source.format == "gguf":
        inner = size("mamba_inner_size")
    elif inner is None:
        inner = size("mamba_expand") * size("hidden_size")
    if heads % groups or inner % heads:
        raise source.wrong(
            names.get("mamba_n_heads", "mamba_n_heads"),
            f"a multiple of {groups} groups, and a divisor of {inner} numbers",
        )
    k_dim, width = size("mamba_d_state", 1 << 14), size("mamba_d_conv", 256)
    return Mamba2(groups, heads, k_dim, inner // heads, width, normed=normed)


def _limits(given: object) -> bool:
    """Whether the steps of tokens have limits; transformers writes infinity as an object."""
    return isinstance(given, list) and (given[:1] != [0.0] or given[1:] not in ([{"__float__": "Infinity"}], [np.inf]))


class Mamba2Family(Family):
    """A family with such layers: where the numbers of its files are."""

    def row_orders(self, config: ModelConfig, format: str) -> dict[str, np.ndarray]:
        """Where the rows of our matrices are in a file's one matrix."""
        found = super().row_orders(config, format)
        for i, state in config.state_layers.items():
            z, conv = np.arange(state.v_size), state.v_size + _conv_order(state)
            step = state.v_size + state.conv_size + np.arange(state.num_v_heads)
            found[f"layers.{i}.state_q"] = np.concatenate([conv, z, step])
        return found

    def transforms(self, config: ModelConfig, format: str) -> dict[str, Transform]:
        """Conversions of what products do not multiply; directories have the logarithm of decays, GGUF files -decay."""
        found = super().transforms(config, format)
        for i, state in config.state_layers.items():
            order = partial(RawTensor.permute_rows, order=_conv_order(state))
            found |= dict.fromkeys((f"layers.{i}.conv", f"layers.{i}.conv_bias"), order)
            found[f"layers.{i}.decay"] = partial(_decay, negated=format == "gguf")
        return found


def _conv_order(state: RecurrentMixer) -> np.ndarray:
    v, k, q = np.split(np.arange(state.conv_size), [state.v_size, state.v_size + state.k_size])
    return np.concatenate([q, k, v])


def _decay(tensor: RawTensor, negated: bool) -> RawTensor:
    return tensor.with_floats(-tensor.dequantize()) if negated else tensor.exponential()
