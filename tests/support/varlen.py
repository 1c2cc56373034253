"""A stand-in for torch's variable-length attention, which a machine without CUDA cannot run."""

from __future__ import annotations

import torch


def varlen(query, key, value, query_starts, key_starts, longest_query, longest, scale, lengths):  # type: ignore[no-untyped-def]
    """What torch's kernel is documented to do, segment by segment, with weights in its own dtype.

    Of each segment only its first entries where `lengths` tells so.
    """
    work = torch.promote_types(query.dtype, torch.float32)
    output, totals = torch.empty_like(query), torch.empty(query.shape[1], len(query), dtype=work)
    ends = key_starts[1:] if lengths is None else key_starts[:-1] + lengths
    assert all(starts.dtype == torch.int32 for starts in (query_starts, key_starts, ends))
    assert int((ends - key_starts[:-1]).max()) == longest
    assert key.is_contiguous()
    assert len(key) == key_starts[-1]
    for first, last, start, end in zip(query_starts[:-1], query_starts[1:], key_starts[:-1], ends, strict=True):
        logits = torch.einsum("qhd,kd->hqk", query[first:last].to(work), key[start:end, 0].to(work)) * scale
        output[first:last] = torch.einsum("hqk,kd->qhd", logits.softmax(dim=-1).to(value.dtype), value[start:end, 0])
        totals[:, first:last] = logits.logsumexp(dim=-1)
    return output, totals
