"""Intervals, tests and correlations over samples: NumPy and SciPy only, and nothing of a trace."""
