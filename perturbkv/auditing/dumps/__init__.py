"""Dumps of engines' caches: file format, layouts, comparison with the plain model (METHOD: Engines' caches)."""
