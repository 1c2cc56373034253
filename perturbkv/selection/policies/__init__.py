"""Eviction systems: one file each, opening with its paper; `registry` names them."""
