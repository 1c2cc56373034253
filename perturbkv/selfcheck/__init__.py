"""What runs on this device against its references: checks that need no trained model, for a GPU above all.

`checks` holds what a check says, `small` the model, `equality`, `kernel` and `placement` one check each.
"""
