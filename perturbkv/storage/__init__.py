"""The trace on disk."""
