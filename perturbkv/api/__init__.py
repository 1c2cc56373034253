"""The functions that a notebook needs: load, measure, read, generate. `import perturbkv as pk` has them all.

Everything that the command line can do goes through these or what they call.
"""
