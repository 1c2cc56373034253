"""The question `quality`: what answers from evicted caches are worth (tables 1 to 6)."""
