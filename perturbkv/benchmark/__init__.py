"""What measuring costs and what evicting saves, as ratios within one run.

`rows` says what is measured and what is to be reached, `suite` measures it in processes that do the `work`, and
`comparison` holds two such runs side by side. `rows` and `comparison` import no torch.
"""
