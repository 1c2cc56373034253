"""The question `needle`: retrieval of a hidden fact from evicted caches (paper, figure 8)."""
