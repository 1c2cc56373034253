"""Search for the kept set of a given size that perturbs one head least.

NumPy and SciPy only; imports only `configs`.
"""
