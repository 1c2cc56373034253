"""Which kept set of a given size perturbs one head least. NumPy and SciPy only; of ours it imports `configs`."""
