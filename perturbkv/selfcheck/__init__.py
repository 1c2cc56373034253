"""What runs on this device against its references: checks that need no trained model, for a GPU above all.

`checks` has what a check says, the kernel's and the placement's; `equality` the small model and decoding from it.
"""
