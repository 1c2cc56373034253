"""A connector to copy into an engine: it takes the blocks of forward passes, layer by layer, and dumps each."""

from pathlib import Path

import torch

import perturbkv as pk


class DumpConnector:
    """Three calls per forward pass; vllm_dump_connector.py makes them from vLLM's hooks."""

    def __init__(self, folder, layout, axis=0, **sizes):
        """Take the dumps' folder, a layer's layout, its axis of blocks, and `write_dump`'s kv_heads, head_size, …"""
        self.folder, self.layout, self.axis, self.sizes = Path(folder), layout, axis, sizes
        self.passes = 0

    def start_step(self, tables):
        """Before it: note id -> (tokens whose entries it leaves in the cache, block table) of every living request."""
        self.layers = {}
        self.requests = [
            {"id": name, "token_ids": list(tokens), "blocks": list(blocks)} for name, (tokens, blocks) in tables.items()
        ]
        self.used = torch.tensor(sorted({block for one in self.requests for block in one["blocks"] if block >= 0}))

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata=None):
        """After each layer, in the model's order: copy the blocks in use, as the next pass overwrites them."""
        blocks = kv_layer.index_select(self.axis, self.used.to(kv_layer.device)).cpu()
        self.layers[layer_name] = {"cache": blocks, "block_ids": self.used}

    def wait_for_save(self):
        """After the last layer: write the dump into a folder with the pass's number, and return that."""
        self.passes += 1
        path = self.folder / str(self.passes)
        return pk.write_dump(path, self.requests, self.layers.values(), layout=self.layout, **self.sizes)
