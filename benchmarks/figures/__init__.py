"""The sources' figures derived again: `python -m benchmarks.figures` writes docs/results/figures-of-the-sources.md."""

from benchmarks.figures.page import PAGE, page

__all__ = ["PAGE", "page"]
