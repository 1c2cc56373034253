"""Models: finding their files, reading and checking them, and one adapter per layout."""
