"""A cache that is really smaller: kept entries, gathered and laid out."""
