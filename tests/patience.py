"""How long tests wait for what must come true. A busy machine takes long for it, and nothing waits on once it has."""

PATIENCE_S = 300.0
