"""Eviction systems: a file each, opening with its paper, where more than the score differs; `registry` names them."""
