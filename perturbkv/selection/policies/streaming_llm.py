"""StreamingLLM (Xiao et al., 2023, https://arxiv.org/abs/2309.17453): the first entries and the most recent ones.

`sinks` = 4 first entries (their section 3.2); the other b − sinks are the most recent, of which the last `window`
always stay. No score is looked at: the only selection is `position`.

The paper gives positions "within the cache" (section 3.2): kept keys are rotated as if they stood at 0 … b − 1, and the
decoding query stands at b. `positions="in-cache"` decodes so; without it entries stay at their positions of the prompt.
"""

from __future__ import annotations

from perturbkv.selection.policies.base import Policy


class StreamingLLM(Policy):
    """Uniform budgets, filled by position."""
