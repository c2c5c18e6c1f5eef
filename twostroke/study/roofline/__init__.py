"""Sizes of models, peaks of machines, and what a step takes on them: nothing is computed with weights.

layer_kind, model_spec       a decoder by its sizes
named_models                 found by name or path
weight_formats               bytes of a weight, and the arithmetic that it is multiplied with
machines                     peaks, links and memory of one device, each with its source
roofline                     how long a step takes
techniques                   what each technique enters, keeps, and takes for a token
"""
