"""Engines that measure a run's samples: this process, worker processes, and a Ray cluster's actors."""
