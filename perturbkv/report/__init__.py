"""A trace -> one HTML file. Imports configs, trace, storage, analyses and figures; no torch."""
