"""Measures, one file each, in the order they are taken."""

from twostroke.evals.measure import Measure
from twostroke.evals.measures.answers import Answers
from twostroke.evals.measures.divergence import Divergence
from twostroke.evals.measures.judge import Judge
from twostroke.evals.measures.likelihood import Likelihood

MEASURES: dict[str, Measure] = {one.name: one for one in (Answers(), Likelihood(), Divergence(), Judge())}

__all__ = ["MEASURES", "Answers", "Divergence", "Judge", "Likelihood"]
