"""The simulated engine beside the real one, fleets with faults, and figures."""
