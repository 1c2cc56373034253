"""Checks of the kernels and cache layouts of a device, above all of a GPU, against references; and a GPU's speed.

`checks` has the result of a check, and the checks of kernel and placement; `equality` those of compact caches;
`gpu_rows` the rows of speed, each a ratio with a target. No trained model is needed.
"""
