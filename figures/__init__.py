"""Result in, matplotlib Figure out: nothing here computes a quantity or saves a file."""
