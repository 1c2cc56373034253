"""The question `horizon`: growth of the perturbation over the decode steps."""
