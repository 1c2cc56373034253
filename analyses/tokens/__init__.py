"""The question `tokens`: the tokens of a prompt that a head keeps and evicts."""
