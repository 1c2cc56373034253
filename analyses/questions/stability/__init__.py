"""The question `stability`: are the most perturbed heads the same ones over prompts, lengths and data sets."""
