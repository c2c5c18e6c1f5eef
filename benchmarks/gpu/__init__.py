"""Both strokes on a GPU: `python3 -m benchmarks.gpu.strokes --out FILE`, random weights in the shapes of real models.

Random weights take the same time as real ones, except in a mixture of experts, whose router is then nearly uniform.
It prints a table, and writes the raw numbers after every case, so that a run that is cut off keeps them.
"""
