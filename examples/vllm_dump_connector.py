"""A connector of vLLM 0.32 that dumps every forward pass: hooks around the class in dump_connector.py.

    vllm.LLM(..., kv_transfer_config={
        "kv_connector": "VllmDumpConnector", "kv_connector_module_path": "vllm_dump_connector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"folder": "dumps", "layout": "vllm-cpu"},
    })

Both files are in a folder that PYTHONPATH names. On a GPU the layout is `vllm` or `vllm-nhd`.
"""

from dataclasses import dataclass

from dump_connector import DumpConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


@dataclass
class Tables(KVConnectorMetadata):
    """What the scheduler tells the worker of a pass: id -> (tokens in the cache after it, block table)."""

    requests: dict


class VllmDumpConnector(KVConnectorBase_V1):
    """vLLM makes two of them: one beside its scheduler, which knows tokens and tables, one in its worker."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        told, model = vllm_config.kv_transfer_config.kv_connector_extra_config, vllm_config.model_config
        self.dump = DumpConnector(
            told["folder"], told["layout"], kv_heads=model.get_num_kv_heads(vllm_config.parallel_config),
            head_size=model.get_head_size(), block_size=vllm_config.cache_config.block_size,
            compute=str(model.dtype).removeprefix("torch."), engine="vLLM",
        )  # fmt: skip
        self.living, self.tables = {}, {}

    # beside the scheduler
    def on_new_request(self, request):
        self.living[request.request_id] = request

    def build_connector_meta(self, scheduler_output):
        for name in scheduler_output.finished_req_ids:
            self.living.pop(name, None)
        computed, again = {}, scheduler_output.scheduled_cached_reqs
        for new in scheduler_output.scheduled_new_reqs:
            self.tables[new.req_id], computed[new.req_id] = list(new.block_ids[0]), new.num_computed_tokens
        for name, blocks, count in zip(again.req_ids, again.new_block_ids, again.num_computed_tokens, strict=True):
            before = [] if name in again.resumed_req_ids else self.tables[name]
            self.tables[name], computed[name] = before + list(blocks[0] if blocks else []), count
        return Tables({
            name: (self.living[name].all_token_ids[: count + scheduler_output.num_scheduled_tokens[name]],
                   self.tables[name])
            for name, count in computed.items()
        })  # fmt: skip

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    # in the worker
    def bind_connector_metadata(self, connector_metadata):
        super().bind_connector_metadata(connector_metadata)
        self.dump.start_step(connector_metadata.requests)

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **others):
        self.dump.save_kv_layer(layer_name, kv_layer)

    def wait_for_save(self):
        if self.dump.layers:  # nothing in a pass without tokens
            self.dump.wait_for_save()

    def start_load_kv(self, forward_context, **others):
        pass

    def wait_for_layer_load(self, layer_name):
        pass
