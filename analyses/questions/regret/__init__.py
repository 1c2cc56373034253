"""The question `regret`: how far is each method from the best kept set."""
