"""What all tables share: a row, the floor of a prefill, and a ratio in words."""

from typing import NamedTuple

from twostroke.models.cost import SequenceRows
from twostroke.study.plan.machines import MachineSpec
from twostroke.study.plan.roofline import Roofline
from twostroke.study.plan.specification import ModelSpec
from twostroke.study.plan.weights import FORMATS


class Row(NamedTuple):
    """One figure: what it is, what the source says, what comes out here, and whether they agree."""

    item: str
    theirs: str
    ours: str
    verdict: str


def floor(model: ModelSpec, machine: MachineSpec, tokens: int, cards: int = 1, known: int = 0) -> float:
    """Milliseconds of a prefill of `tokens` behind `known` ones in bf16, below which no program can be."""
    step = Roofline(model, machine, FORMATS["bf16"]).step([SequenceRows(tokens, known, 1)])
    needed = max(step.flops / machine.flops["bf16"], FORMATS["bf16"].total(model) / machine.bandwidth)
    return 1e3 * needed / cards


def off(theirs: float, ours: float, near: float = 0.06) -> str:
    """ "agree", "2.8 times low" or "12 times high"."""
    ratio = ours / theirs
    if abs(ratio - 1) <= near:
        return "agree"
    return f"{ratio:.1f} times low" if ratio > 1 else f"{1 / ratio:.1f} times high"


def against(theirs_ms: float, floor_ms: float) -> str:
    """What a time is worth, given its floor."""
    return f"impossible ({floor_ms / theirs_ms:.1f} times)" if theirs_ms < floor_ms else "possible"
