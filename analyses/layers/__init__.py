"""The question `layers`: how far the residual stream drifts, layer by layer (figures 3, 5 and 6)."""
