"""Scores of cache entries: window attention, value norms, and importance of heads."""
