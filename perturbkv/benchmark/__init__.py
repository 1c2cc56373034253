"""The benchmark: the cost of measuring and the savings of evicting, as ratios within one run.

`rows` has the rows and their targets, and compares two runs; it imports no torch. `suite` measures in processes that
run `work`.
"""
