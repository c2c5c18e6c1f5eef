"""Techniques, one file each. A technique imported here is known everywhere."""

from twostroke.methods.best_of import BestOf
from twostroke.methods.compress import Compress
from twostroke.methods.drop import Drop
from twostroke.methods.method import METHODS, Method, Prompt
from twostroke.methods.overfill import OverFill
from twostroke.methods.plain import Plain
from twostroke.methods.refresh import Refresh
from twostroke.methods.registry import load_installed, load_module, method
from twostroke.methods.repeat import Repeat
from twostroke.methods.reread import Reread
from twostroke.methods.snap import Snap
from twostroke.methods.speculative import Speculative
from twostroke.methods.student import Student

__all__ = [
    "METHODS",
    "BestOf",
    "Compress",
    "Drop",
    "Method",
    "OverFill",
    "Plain",
    "Prompt",
    "Refresh",
    "Repeat",
    "Reread",
    "Snap",
    "Speculative",
    "Student",
    "load_installed",
    "load_module",
    "method",
]
