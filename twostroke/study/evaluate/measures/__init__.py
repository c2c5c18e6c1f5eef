"""Measures, one file each, in the order they are taken."""

from twostroke.study.evaluate.measure import Measure
from twostroke.study.evaluate.measures.answers import Answers
from twostroke.study.evaluate.measures.divergence import Divergence
from twostroke.study.evaluate.measures.judge import Judge
from twostroke.study.evaluate.measures.likelihood import Likelihood
from twostroke.study.evaluate.measures.serving import Serving

MEASURES: dict[str, Measure] = {one.name: one for one in (Answers(), Likelihood(), Divergence(), Judge(), Serving())}

__all__ = ["MEASURES", "Answers", "Divergence", "Judge", "Likelihood", "Serving"]
