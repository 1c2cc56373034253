"""Reports: one trace or several as one HTML page that opens from disk, without network.

May import configs, trace, storage, analyses and figures; nothing but `pk.report`, the command line and `benchmarks`
imports it, and no torch. Python computes every number; the page's JavaScript chooses, looks up, sorts and draws.
"""
