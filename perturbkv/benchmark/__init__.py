"""What measuring costs and what evicting saves, as ratios within one run.

`rows` says what is measured and what is to be reached, and sets two such runs side by side; it imports no torch.
`suite` measures in processes that do the `work`.
"""
