"""The physically smaller cache: kept entries, gathered and laid out in memory."""
