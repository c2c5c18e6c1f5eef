"""Models as descriptions: layers, RoPE, dropout, and the cost of a step."""
