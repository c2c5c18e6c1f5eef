"""Sizes, machines and step times."""
