"""The question `audit`: is an eviction that is not ours broken, or only lossy."""
