"""Answers held before a judge that is not ours: a command that reads and writes jsonl. Imports no torch."""
