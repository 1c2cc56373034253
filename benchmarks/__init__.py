"""What measuring costs and evicting saves, as ratios within one run: `python -m benchmarks -h`, in a checkout.

`rows` has the rows and their targets; `suite`, `many_samples` and `report_pages` measure them, most in processes that
run `work`. Nothing imports this folder. It imports the pieces of perturbkv that a row measures by themselves, and from
`perturbkv.selfcheck` the rows of a GPU and how a row is measured.
"""
