"""What tests of changed trace files share."""

from __future__ import annotations

from tests.support.changed import path, whole

__all__ = ["path", "whole"]
