"""Longer answers from evicted caches: generation, recompression, grading."""
