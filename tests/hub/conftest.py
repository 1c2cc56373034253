"""What tests of the hub share."""

from __future__ import annotations

from tests.support.hub_models import folder, hub

__all__ = ["folder", "hub"]
