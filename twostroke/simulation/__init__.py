"""The engine on a virtual clock, with a cost model in place of kernels. The scheduler is the engine's own.

clock       virtual time                               device      a compiled pass that takes time and computes nothing
blank       memory, tokenizer: what nobody reads       costs       how long a step takes, by roofline or as measured here
"""
