"""One sample measured, and what a run of many does."""
