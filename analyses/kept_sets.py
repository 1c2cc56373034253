"""Where two configurations keep the same entries.

What follows from equal kept sets is equal, whatever rounding says (METHOD: the protocol, 4). What is propagated follows
from them only where both configurations have the entries at the same positions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.trace import Trace

Same = NDArray[np.bool_]


def isolated(trace: Trace, first: int, second: int) -> Same:
    """(sample, layer, head) True where the head's own sets are equal: so is its isolated perturbation.

    Only where both configurations store them alike, in as many bits, and correct alike for what went; and not of pages
    that each step and each run reads anew, of which a trace holds those of the full run's first step, nor of lines, of
    which it holds what the prompt's last query looks at.
    """
    return np.asarray(trace.same_kept(first, second) & _stored_alike(trace, first, second)[:, None, None])


def propagated(trace: Trace, first: int, second: int) -> Same:
    """(sample, layer, head) True where also all sets of earlier layers are equal: so is what reaches the head."""
    same = _alike(trace, first, second)
    before = np.ones((len(same), 1), dtype=bool)
    return np.asarray(same & np.concatenate([before, _layers(same)[:, :-1]], axis=1)[:, :, None])


def layers(trace: Trace, first: int, second: int) -> Same:
    """(sample, layer) True where all sets up to the layer are equal: so is the residual stream after it."""
    return _layers(_alike(trace, first, second))


def whole(trace: Trace, first: int, second: int) -> Same:
    """(sample,) True where all sets are equal: so are the final norm, the logits and every later token."""
    return np.asarray(layers(trace, first, second)[:, -1])


def _alike(trace: Trace, first: int, second: int) -> Same:
    """(sample, layer, head) True where the sets are equal and decoding sees them at the same positions."""
    same, (one, other) = isolated(trace, first, second), (trace.run.configs[place] for place in (first, second))
    moved = trace.arrays["evicted"][trace.ok][:, first] != 0  # what keeps everything has the prompt's positions
    return same if _positions(one) == _positions(other) else np.asarray(same & ~moved[:, None, None])


def _stored_alike(trace: Trace, first: int, second: int) -> Same:
    """(sample,) True where equal kept sets are the same cache: corrections that differ are alike where nothing went."""
    one, other = (trace.run.configs[place] for place in (first, second))
    whole = trace.arrays["evicted"][trace.ok][:, first] == 0
    alike = one.precision == other.precision and one.evicts and other.evicts
    return np.asarray(np.where(whole, one.precision == other.precision, alike & (one.correction == other.correction)))


def _positions(config: EvictionConfig) -> str:
    """Where decoding sees the kept keys: an option of the one policy that may move them."""
    return str(config.policy.options.get("positions", "kept"))


def _layers(same: Same) -> Same:
    return np.asarray(np.logical_and.accumulate(same.all(axis=2), axis=1))
