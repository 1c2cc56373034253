"""The question `needle`: is a hidden fact still found (figure 8)."""
