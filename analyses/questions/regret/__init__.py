"""How far each method is from the best kept set."""
