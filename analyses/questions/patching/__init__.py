"""Which layers and heads decide: one configuration's kept sets in another's run."""
