"""Where the samples of a run are measured."""
