"""Models: where their files are, how they are read, and one adapter per layout."""
