"""A whole run: planned, carried out on an engine, resumed, divided into shards."""
