"""Intervals, tests and correlations over samples, with NumPy and SciPy only: nothing here knows a trace."""
