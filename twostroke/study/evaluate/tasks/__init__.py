"""Tasks, one file each. A file listed here is known to `twostroke eval`."""

from twostroke.study.evaluate.tasks.arc import ArcChallenge, ArcEasy
from twostroke.study.evaluate.tasks.cloze import Cloze
from twostroke.study.evaluate.tasks.longbench import LongBench
from twostroke.study.evaluate.tasks.longform import LongForm
from twostroke.study.evaluate.tasks.names import MiddleMatch, NameIndex
from twostroke.study.evaluate.tasks.perplexity import Perplexity
from twostroke.study.evaluate.tasks.ruler import Ruler

__all__ = [
    "ArcChallenge", "ArcEasy", "Cloze", "LongBench", "LongForm", "MiddleMatch", "NameIndex", "Perplexity", "Ruler",
]  # fmt: skip
