"""The question `audit`: whether an external eviction is broken or only lossy."""
