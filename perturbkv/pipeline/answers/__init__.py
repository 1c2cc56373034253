"""Longer answers from evicted caches: generation, and compression while decoding."""
