"""Measures, one file each. A file listed here is known to `twostroke eval`."""

from twostroke.evals.measures.answers import Answers
from twostroke.evals.measures.divergence import Divergence
from twostroke.evals.measures.judge import Judge
from twostroke.evals.measures.likelihood import Likelihood

__all__ = ["Answers", "Divergence", "Judge", "Likelihood"]
