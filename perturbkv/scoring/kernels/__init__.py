"""Kernels for accelerators. Only here is Triton imported, and only when a kernel is used.

Modules of this package may import Triton at their top; whoever uses one imports it inside the function that needs it,
so that everything else runs where Triton is missing. Of ours they import nothing.
"""
