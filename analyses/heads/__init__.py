"""The question `heads`: which heads does a selection help, and by how much (figure 2 of the paper)."""
