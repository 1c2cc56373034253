"""Audits of external evictions: comparison with the plain model that sees exactly the kept entries (METHOD: Audit).

An audit measures an `AuditTrace`; analyses interpret it.
"""
