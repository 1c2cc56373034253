"""The question `layers`: drift of the residual stream, layer by layer (paper, figures 3, 5 and 6)."""
