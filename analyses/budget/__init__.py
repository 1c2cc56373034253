"""The question `budget`: how many entries or bytes are enough (figure 1)."""
