"""The trace file: reading, writing and checking it. FORMAT.md in the parent folder is its specification."""
