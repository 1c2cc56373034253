"""Needle prompts with a second fact of the same words about another city: which one was asked for has to be read."""

from __future__ import annotations

import random
from dataclasses import replace

from perturbkv.datasets.needle import CITIES, NEEDLE
from perturbkv.datasets.sample import Sample
from perturbkv.errors import DatasetError


def distracted(sample: Sample, seed: int) -> tuple[Sample, str]:
    """A needle sample with the other city's fact right behind its own, and its own fact's sentence.

    Raises DatasetError where the sample is not needle's.
    """
    answer = sample.answers[0] if sample.answers else ""
    found = [fact for city in CITIES if (fact := NEEDLE.format(city=city, number=answer)) in sample.context]
    if not found:
        msg = f"expected sample '{sample.id}' to hold needle's fact, got a context without it; use --dataset needle"
        raise DatasetError(msg)
    draw = random.Random(f"distraction/{seed}/{sample.id}")
    others = [city for city in CITIES if f" {city} " not in found[0]]
    wrong = NEEDLE.format(city=draw.choice(others), number=draw.randrange(1_000_000, 10_000_000))
    return replace(sample, context=sample.context.replace(found[0], f"{found[0]} {wrong}", 1)), found[0]
