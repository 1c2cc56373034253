"""What an entry is worth: window attention, value norms, scores of heads."""
