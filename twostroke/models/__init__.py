"""Models as descriptions: what a decoder is made of, RoPE, dropout, and what a step costs."""
