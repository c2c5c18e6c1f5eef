"""Thoughts that a model writes before its answer.

forms        how families mark them, and which form a model uses
reader       sets them apart in a text that arrives in pieces
constraint   lets a grammar begin behind a thought, and a budget end it
reasoning    all of this for one model
"""
