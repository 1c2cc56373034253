"""A connector to copy into an engine: it takes the blocks of a forward pass, layer by layer, and writes a dump."""

import torch

import perturbkv as pk


class DumpConnector:
    """Three calls per forward pass; vLLM's KVConnectorBase_V1 has hooks with the names of the last two."""

    def __init__(self, folder, layout, **sizes):
        """Take a new folder, the axes of a layer's tensor, and kv_heads, head_size, block_size of `pk.write_dump`."""
        self.folder, self.layout, self.sizes = folder, layout, sizes
        self.axis = layout.split().index("block")

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
        """After the last layer: write the dump, and return its folder."""
        return pk.write_dump(self.folder, self.requests, self.layers.values(), layout=self.layout, **self.sizes)
