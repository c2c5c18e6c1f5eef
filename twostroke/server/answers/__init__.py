"""How each API writes what a generation makes, whole and as a stream."""
