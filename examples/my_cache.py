"""Two evictions to audit: `perturbkv audit examples/my_cache.py:evict`, and with a mistake, `:evict_wrongly`."""

import torch
from transformers import DynamicCache


def evict(model, input_ids, attention_mask, keep=128):
    """Keep the first four and the most recent entries; the same for every layer and head."""
    cache = DynamicCache()
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)  # of left-padded prompts
    prompt = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": positions}
    model(**prompt, past_key_values=cache, logits_to_keep=1)
    n = input_ids.shape[1]
    for layer in cache.layers:
        rows = [_kept(n, int(n - length), keep) for length in attention_mask.sum(-1)]
        layer.keys = torch.stack([keys[:, row] for keys, row in zip(layer.keys, rows, strict=True)])
        layer.values = torch.stack([values[:, row] for values, row in zip(layer.values, rows, strict=True)])
    cache.tokens = attention_mask.sum(-1, keepdim=True)
    return cache


def decode(model, cache, token, step):
    """Return the logits of new tokens that stand behind the whole prompt: the cache's length is what is left of it."""
    positions = cache.tokens + step + torch.arange(token.shape[1], device=token.device)
    return model(input_ids=token, position_ids=positions, past_key_values=cache).logits


def evict_wrongly(model, input_ids, attention_mask, keep=128):
    """Evict likewise, but gather the values one entry too late in layer 5."""
    cache = evict(model, input_ids, attention_mask, keep)
    layer = cache.layers[5]
    layer.values = layer.values.roll(1, dims=2)
    return cache


def _kept(n, padding, keep):
    """Return the positions of a row that stay: four after the padding, and the last ones."""
    return torch.cat([torch.arange(padding, padding + 4), torch.arange(n - keep + 4, n)])
