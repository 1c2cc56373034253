"""Trace in, frozen result out: NumPy and SciPy only, one question per file. Imports no torch and no figures."""
