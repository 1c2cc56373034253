"""Trace in, frozen result out: NumPy only, one question per file. Imports no torch and no figures."""
