"""The question `correlation`: does perturbation tell which answers are lost."""
