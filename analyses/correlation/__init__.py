"""The question `correlation`: does perturbation at the first step tell which answers are lost."""
