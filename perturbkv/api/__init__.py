"""The functions that a notebook calls: load, measure, read, generate. `import perturbkv as pk` has them all.

The command line does its work through these functions or those that they call.
"""
