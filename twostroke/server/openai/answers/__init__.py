"""How each endpoint writes what was generated, whole and as a stream."""
