"""Checkpoints: GGUF files and Hugging Face directories, opened without decoding anything, and the catalog of models."""

from twostroke.checkpoints.catalog import CATALOG, DEFAULT_MODEL, CatalogEntry
from twostroke.checkpoints.checkpoint import Checkpoint, GgufTokenizerSource, HfTokenizerSource
from twostroke.checkpoints.resolve import open_checkpoint

__all__ = [
    "CATALOG",
    "DEFAULT_MODEL",
    "CatalogEntry",
    "Checkpoint",
    "GgufTokenizerSource",
    "HfTokenizerSource",
    "open_checkpoint",
]
