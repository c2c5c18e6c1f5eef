"""Evaluations: techniques compared on the same items.

A task (tasks/) brings items, a contender is a method under a name, a measure (measures/) brings numbers about both.
evaluation.py runs them, summary.py estimates with intervals, report.py writes it down.
"""
