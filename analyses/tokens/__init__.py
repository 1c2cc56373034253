"""The question `tokens`: which words of a prompt a head keeps and evicts."""
