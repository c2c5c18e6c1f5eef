"""Techniques, one file each. A technique imported here is known everywhere."""

from twostroke.methods.attention_matching import AttentionMatching
from twostroke.methods.best_of import BestOf
from twostroke.methods.chunkkv import ChunkKV
from twostroke.methods.compose import Compose
from twostroke.methods.compress import Compress
from twostroke.methods.critical_kv import CriticalKV
from twostroke.methods.curdkv import CurDKV
from twostroke.methods.d2o import D2O
from twostroke.methods.drop import Drop
from twostroke.methods.duo_attention import DuoAttention
from twostroke.methods.expected_attention import ExpectedAttention
from twostroke.methods.finch import Finch
from twostroke.methods.heavy_hitters import HeavyHitters
from twostroke.methods.key_norms import KeyNorms
from twostroke.methods.keydiff import KeyDiff
from twostroke.methods.kvzip import KVzip
from twostroke.methods.lagkv import LagKV
from twostroke.methods.method import METHODS, Method, Prompt
from twostroke.methods.overfill import OverFill
from twostroke.methods.partrep import PartRep
from twostroke.methods.passages import Passages
from twostroke.methods.plain import Plain
from twostroke.methods.q_filters import QFilters
from twostroke.methods.refresh import Refresh
from twostroke.methods.registry import load_installed, load_module, method, method_of
from twostroke.methods.repeat import Repeat
from twostroke.methods.reread import Reread
from twostroke.methods.rkv import RKV
from twostroke.methods.snap import Snap
from twostroke.methods.speculative import Speculative
from twostroke.methods.student import Student
from twostroke.methods.tova import Tova
from twostroke.methods.triattention import TriAttention

__all__ = [
    "D2O", "METHODS", "RKV", "AttentionMatching", "BestOf", "ChunkKV", "Compose", "Compress", "CriticalKV", "CurDKV",
    "Drop", "DuoAttention", "ExpectedAttention", "Finch", "HeavyHitters", "KVzip", "KeyDiff", "KeyNorms", "LagKV",
    "Method", "OverFill", "PartRep", "Passages", "Plain", "Prompt", "QFilters", "Refresh", "Repeat", "Reread", "Snap",
    "Speculative", "Student", "Tova", "TriAttention", "load_installed", "load_module", "method", "method_of",
]  # fmt: skip
