"""Tools to study inference: plan, simulate, explain, evaluate and bench; pruning and distilling of students."""
