"""Evaluations: techniques compared on the same items. A task brings items, a measure brings numbers about them."""
