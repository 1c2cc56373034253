"""The choices of a user, frozen and validated at construction."""
