"""The question `heads`: heads that a selection perturbs less, and by how much (paper, figure 2)."""
