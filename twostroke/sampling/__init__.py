"""Sampling tokens from logits: parameters, constraints, noise, statistics, and the sampler."""

from twostroke.sampling.params import SamplingParams

__all__ = ["SamplingParams"]
