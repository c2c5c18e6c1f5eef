"""Tasks, one file each. A file listed here is known to `twostroke eval`."""

from twostroke.evals.tasks.arc import ArcChallenge, ArcEasy
from twostroke.evals.tasks.cloze import Cloze
from twostroke.evals.tasks.longform import LongForm
from twostroke.evals.tasks.names import MiddleMatch, NameIndex
from twostroke.evals.tasks.perplexity import Perplexity

__all__ = ["ArcChallenge", "ArcEasy", "Cloze", "LongForm", "MiddleMatch", "NameIndex", "Perplexity"]
