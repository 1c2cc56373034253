"""A run while it goes on: its journal, its shards, and the joining of both into a trace file."""
