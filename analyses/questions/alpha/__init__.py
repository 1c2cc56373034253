"""The question `alpha`: what a share of stage 1 per layer or head is worth."""
