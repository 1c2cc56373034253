"""Longer answers from evicted caches: generation and recompression."""
