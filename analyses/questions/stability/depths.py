"""Where in depth the suffering of heads lies: what models of other layers and heads can be compared in.

Heads of two models cannot be matched. What both have is a relative depth, layer / (layers − 1): on it lie the layers'
shares of the sum over all heads, brought to 20 points by lines; and how much the first layers carry, and few heads.
Of a model of which only some layers are measured, points before the first of them and behind the last have no value.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.questions.stability.rank_reliability import Ranked, of_both
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import half_share, ratio
from perturbkv.analyses.stats.estimates import Estimate, over_prompts
from perturbkv.analyses.stats.intervals import POSITIVE, Band, share_of

POINTS = 20
GRID = np.linspace(0, 1, POINTS)


@dataclass(frozen=True)
class Depth:
    """How the suffering of one trace is spread over depth; shares of the sum over all heads.

    Attributes:
        profile: (point,) the mean head at a relative depth over the mean head of all, mean over samples; NaN beyond the
            layers measured; `profile_interval` of it.
        first_layer: share of the sum in the first layer measured.
        first_tenth: in the first tenth of the layers measured, rounded up.
        half: share of the heads that carries half of the sum.
    """

    profile: Floats
    profile_interval: Band
    first_layer: Estimate
    first_tenth: Estimate
    half: Estimate


def depth(suffered: Floats, places: Floats) -> Depth:
    """Of a trace's (sample, layer, head) relative perturbation; `places` (layer,) are relative depths."""
    layers, heads = suffered.shape[1:]
    shares = np.asarray(ratio(suffered.sum(axis=2), suffered.sum(axis=(1, 2))[:, None]))
    each, kind = profiles(suffered, places), share_of(layers * heads)
    return Depth(
        profile=each.mean(axis=0),
        profile_interval=intervals.band(lambda weights: weights @ each, len(each), POSITIVE),
        first_layer=over_prompts(shares[:, 0], kind),
        first_tenth=over_prompts(shares[:, : ceil(layers / 10)].sum(axis=1), kind),
        half=over_prompts(np.array([half_share(one) for one in suffered]), kind),
    )


def profiles(suffered: Floats, places: Floats) -> Floats:
    """(sample, point) of (sample, layer, head): layers' means over the sample's own mean, by lines over `places`."""
    means = np.asarray(ratio(suffered.mean(axis=2), suffered.mean(axis=(1, 2))[:, None]))
    return np.stack([np.interp(GRID, places, one, left=np.nan, right=np.nan) for one in means])


def alike(first: Floats, second: Floats) -> Ranked:
    """Spearman's ρ of two traces' mean profiles, (sample, point) each, over the points that both have.

    Neighbouring points are alike, so that it says less than so many points would.
    """
    shared = ~np.isnan(first).any(axis=0) & ~np.isnan(second).any(axis=0)
    return of_both(first[:, shared], second[:, shared], paired=False)
