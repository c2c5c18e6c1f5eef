"""Entropy and MC-dropout variance as triggers of a refresh, on synthetic logits: a published simulation repeated.

    python -m benchmarks.dropout_simulation

Emara, Kim and Abdelfattah 2025, "KV-Cache Refresh Methods for Long Generation", end with a simulation of 400 steps in
four phases. They publish a table of means and firings, but no parameters. `Setting` has ours, most of them chosen to
reproduce the published means (see docs/results/dropout-simulation.md). No model is involved: that variance between
passes is high in drift and low in ambiguity is an assumption of the simulation.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

PHASES = {"conf": "confident", "drift": "drifting", "post": "refreshed", "alea": "ambiguous"}
# Mean entropy, mean variance, and the shares of steps at which each trigger fires, as published.
PUBLISHED = {
    "alea": (8.5172, 0.0001, 0.01, 0.01),
    "conf": (0.0096, 0.0001, 0.00, 0.00),
    "drift": (8.1466, 0.0028, 0.00, 0.03),
    "post": (0.0096, 0.0001, 0.00, 0.00),
}
SIGNALS = ("entropy", "variance")


@dataclass(frozen=True)
class Setting:
    """Parameters of the logits. Entropies are in nats, variances in squared logits.

    Attributes:
        margin: logit of the likely token minus that of all others, while the model is certain.
        spread: standard deviation of the logits over the vocabulary, in drift.
        flatness: the same in ambiguity; almost 0.
        calm, upset: standard deviation of a logit between passes: `upset` in drift, `calm` elsewhere.
        wobble: variation of that between steps of a phase, as the standard deviation of its logarithm.
        look: steps between evaluations of a trigger; cooldown: the least number of steps between firings.
    """

    vocabulary: int = 5000
    margin: float = 16.0
    spread: float = 0.86
    flatness: float = 0.01
    calm: float = 0.01
    upset: float = 0.0543
    wobble: float = 0.0
    passes: int = 20
    look: int = 16
    cooldown: int = 32


def phases() -> np.ndarray:
    """[400] names. Steps that the text assigns to no phase are confident, which matches the table's counts."""
    names = np.full(400, "conf", dtype="<U5")
    names[100:200], names[200:250], names[250:350] = "drift", "post", "alea"
    return names


def simulate(setting: Setting, names: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """For each step, the entropy of the pass without dropout, and the mean variance of a logit over the others."""
    entropies, variances = np.empty(len(names)), np.empty(len(names))
    for step, name in enumerate(names):
        logits = np.zeros(setting.vocabulary)
        if name in ("conf", "post"):
            logits[rng.integers(setting.vocabulary)] = setting.margin
        else:
            logits = rng.standard_normal(setting.vocabulary) * (setting.spread if name == "drift" else setting.flatness)
        deviation = (setting.upset if name == "drift" else setting.calm) * np.exp(rng.normal(0, setting.wobble))
        drawn = logits + deviation * rng.standard_normal((setting.passes, setting.vocabulary), np.float32)
        entropies[step], variances[step] = entropy(logits), drawn.var(0).mean()
    return {"entropy": entropies, "variance": variances}


def entropy(logits: np.ndarray) -> float:
    """The entropy of the softmax of [vocabulary] logits, in nats."""
    log_p = logits - logits.max()
    log_p -= np.log(np.exp(log_p).sum())
    return float(-(np.exp(log_p) * log_p).sum())


def firings(signal: np.ndarray, threshold: float, look: int, cooldown: int) -> list[int]:
    """The steps at which a trigger fires: evaluated, above the threshold, and `cooldown` after the last firing."""
    fired: list[int] = []
    for step in range(0, len(signal), look):
        if signal[step] > threshold and (not fired or step - fired[-1] >= cooldown):
            fired.append(step)
    return fired


def auc(positive: np.ndarray, negative: np.ndarray) -> float:
    """The area under the ROC curve: P(positive > negative) for random steps of either kind; ties count half."""
    above = (positive[:, None] > negative).mean()
    return float(above + (positive[:, None] == negative).mean() / 2)


def threshold(signal: np.ndarray, names: np.ndarray, percent: float, over: Sequence[str]) -> float:
    """A percentile of the signal over the steps of these phases."""
    return float(np.percentile(signal[np.isin(names, over)], percent))


def main() -> None:
    """Print all tables as Markdown."""
    argparse.ArgumentParser(description="Triggers of a refresh on synthetic logits.").parse_args()
    setting, names = Setting(), phases()
    signals = simulate(setting, names, np.random.default_rng(0))
    print(f"{setting}, seed 0\n")
    everything = tuple(PHASES)
    as_published = {
        "entropy": threshold(signals["entropy"], names, 98, everything),
        "variance": threshold(signals["variance"], names, 98, ("conf", "post")),
    }
    fired = {name: firings(signals[name], as_published[name], setting.look, setting.cooldown) for name in SIGNALS}
    print_phases(names, signals, fired)
    for name in SIGNALS:
        print(f"\n{name}: threshold {as_published[name]:.6f}, fires at {fired[name]}")
    print("\nFirings in each phase, means of 20 seeds; `wrong` are all but those in drift.\n")
    print_calibrations(setting, names)
    print("\nArea under the ROC curve, 5 seeds together.\n")
    print_areas(setting, names)


def print_phases(names: np.ndarray, signals: dict[str, np.ndarray], fired: dict[str, list[int]]) -> None:
    """A row for each phase, with published values in brackets."""
    print("| phase | steps | mean entropy | mean variance | entropy fires | variance fires |")
    print("|---|--:|--:|--:|--:|--:|")
    for phase, published in PUBLISHED.items():
        inside = names == phase
        means = [signals[name][inside].mean() for name in SIGNALS]
        shares = [inside[fired[name]].sum() / inside.sum() for name in SIGNALS]
        ours = [f"{value:.4f}" for value in means] + [f"{value:.2f}" for value in shares]
        theirs = [f"{value:.{places}f}" for value, places in zip(published, (4, 4, 2, 2), strict=True)]
        cells = " | ".join(f"{mine} ({other})" for mine, other in zip(ours, theirs, strict=True))
        print(f"| {phase} | {inside.sum()} | {cells} |")


def print_calibrations(setting: Setting, names: np.ndarray) -> None:
    """Both triggers with each choice of threshold."""
    runs = [simulate(setting, names, np.random.default_rng(seed)) for seed in range(20)]
    print("| threshold | trigger | drift | ambiguous | confident, refreshed | wrong |")
    print("|---|---|--:|--:|--:|--:|")
    for over, title in ((("conf", "post"), "confident steps"), (tuple(PHASES), "all steps")):
        for percent in (97, 99):
            for name in SIGNALS:
                counts = dict.fromkeys(PHASES, 0.0)
                for run in runs:
                    least = threshold(run[name], names, percent, over)
                    for step in firings(run[name], least, setting.look, setting.cooldown):
                        counts[str(names[step])] += 1 / len(runs)
                certain = counts["conf"] + counts["post"]
                cells = (counts["drift"], counts["alea"], certain, counts["alea"] + certain)
                row = " | ".join(f"{count:.2f}" for count in cells)
                print(f"| {percent}th percentile of {title} | {name} | {row} |")


def print_areas(setting: Setting, names: np.ndarray) -> None:
    """How well each signal separates drift from ambiguity and from all other steps, by assumed variances."""
    print("| signal | upset / calm | wobble | drift or ambiguous | drift or any other |")
    print("|---|--:|--:|--:|--:|")
    print(f"| entropy | any | any | {areas(setting, names, 'entropy')} |")
    for wobble in (0.0, 0.3):
        for ratio in (setting.upset / setting.calm, 2.0, 1.2, 1.0):
            changed = replace(setting, upset=setting.calm * ratio, wobble=wobble)
            print(f"| variance | {ratio:.2f} | {wobble} | {areas(changed, names, 'variance')} |")


def areas(setting: Setting, names: np.ndarray, name: str) -> str:
    """The AUC of a signal: drift against ambiguity, and against all other steps."""
    signal = np.concatenate([simulate(setting, names, np.random.default_rng(seed))[name] for seed in range(5)])
    phase = np.tile(names, 5)
    drift = signal[phase == "drift"]
    return f"{auc(drift, signal[phase == 'alea']):.3f} | {auc(drift, signal[phase != 'drift']):.3f}"


if __name__ == "__main__":
    main()
