"""Pins: every result of a version, held side by side with those of another, bit for bit.

    python -m tests.pins [--before COMMIT] [--only commands,files] [--again]

The recorders here run what a user can run (the command line and the public names) and leave a flat dictionary of names
and values each. They are run in a tree of the earlier commit, once, and in this checkout; what differs is printed.
"""
