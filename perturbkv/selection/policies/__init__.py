"""Eviction systems that differ in more than the score: one file each, with its paper; `registry` lists them."""
