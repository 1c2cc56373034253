"""Configurations that are measured in a way of their own: pages, sparse prefills, few bits, corrections, presses."""
