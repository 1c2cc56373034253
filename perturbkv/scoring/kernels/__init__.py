"""Kernels for accelerators; only here is Triton imported, and only when a kernel is used.

Modules of this package may import Triton at their top; code that uses one imports it inside a function, so that
everything else runs without Triton. They import nothing else of perturbkv.
"""
