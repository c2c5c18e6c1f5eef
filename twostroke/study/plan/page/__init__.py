"""A plan as one self-contained HTML page with plots."""

from twostroke.study.plan.page.page import render, write_page

__all__ = ["render", "write_page"]
