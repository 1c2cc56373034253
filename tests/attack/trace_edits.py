"""Ways to spoil a trace file through HDF5: every one leaves a file that HDF5 itself finds in order.

Sums that the file has of its contents are taken away where an edit is nonsense by itself, so that not they alone find
it; where it would make sense in a file that somebody else wrote, they stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import h5py
import numpy as np

from tests.attack.trace_numbers import (
    flags_at_odds,
    no_numbers,
    nonsense_count,
    nonsense_position,
    other_numbers,
    other_text,
    overlapping_places,
    text_out_of_place,
    unsorted_positions,
)
from tests.attack.trace_places import (
    cyclic_link,
    external_link,
    external_storage,
    group_instead,
    huge,
    huge_chunks,
    huge_everywhere,
    second_link,
    soft_link,
    unreadable_filter,
    virtual,
)
from tests.attack.trace_shapes import (
    another_name,
    committed_type,
    nothing_at_all,
    odd_floats,
    other_scales,
    other_strings,
    removed,
    renamed,
    reshaped,
    retyped,
    strangely_typed,
    turned,
)
from tests.attack.trace_words import (
    another_model,
    another_run,
    broken_run,
    deep_run,
    longer_axis,
    lost_attribute,
    many_attributes,
    no_root_attribute,
    other_configs,
    other_ids,
    other_labels,
    other_places,
    reference_attribute,
    root_attribute,
    strange_attribute,
    strangers,
)

Edit = Callable[[h5py.File, np.random.Generator], None]

ALONE: Mapping[Edit, int] = {
    strange_attribute: 25, lost_attribute: 10, reference_attribute: 6, root_attribute: 20, no_root_attribute: 4,
    broken_run: 24, another_run: 40, deep_run: 4, other_configs: 6, other_labels: 6, other_ids: 6, other_places: 8,
    longer_axis: 8, nonsense_count: 24, nonsense_position: 10, unsorted_positions: 6, overlapping_places: 4,
    text_out_of_place: 6, flags_at_odds: 10, no_numbers: 10, soft_link: 12, external_link: 12, cyclic_link: 6,
    second_link: 5, external_storage: 12, virtual: 8, huge: 8, huge_everywhere: 12, huge_chunks: 5,
    unreadable_filter: 8, group_instead: 12, committed_type: 6, other_strings: 10, strangers: 8, many_attributes: 2,
    retyped: 26, strangely_typed: 16, odd_floats: 4, reshaped: 12, nothing_at_all: 5, turned: 10, other_scales: 12,
}  # fmt: skip
"""Nonsense by itself -> how often it is tried: without the file's sums every other time."""
SUMMED: Mapping[Edit, int] = {
    removed: 8, renamed: 6, another_name: 8, other_numbers: 16, other_text: 3, another_model: 6,
}  # fmt: skip
"""What could be another trace, but for the sums."""
