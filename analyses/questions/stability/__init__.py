"""Are the heads that suffer the same ones over prompts, lengths and data sets."""
