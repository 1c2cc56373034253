"""The question `horizon`: does perturbation grow over the decode steps."""
