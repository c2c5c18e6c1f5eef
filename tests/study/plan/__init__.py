"""Plans: counted by hand, against the engine, and against published numbers."""
