"""What tests of the hub share."""

from __future__ import annotations

from tests.support.hub_models import asked_anew, folder, hub

__all__ = ["asked_anew", "folder", "hub"]
