"""Checks of the kernels and cache layouts of a device, above all of a GPU, against references; no trained model.

`checks` has the result of a check, and the checks of kernel and placement; `equality` those of compact caches.
"""
