"""An eviction that is not ours, held against the plain model with a mask of exactly what it keeps (METHOD: Audit).

It measures an `AuditTrace`; what that means is told by analyses.
"""
