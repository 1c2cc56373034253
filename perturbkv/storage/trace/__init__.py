"""The trace file: read, written, checked. FORMAT.md in the folder above specifies it."""
