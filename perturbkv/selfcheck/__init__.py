"""Checks of this device's kernels and layouts against references, above all of a GPU; no trained model is needed.

`checks` has the result of a check, the kernel's check and the placement's; `equality` decoding from a small model.
"""
