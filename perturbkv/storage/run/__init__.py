"""An unfinished run on disk: its journal, its shards, and how both become a trace file."""
