"""Trace in, frozen result out: NumPy and SciPy only, a folder per question. Imports no torch and no figures."""
