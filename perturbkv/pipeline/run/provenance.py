"""What a trace says of its making: model, weights, device, and the libraries' versions."""

from __future__ import annotations

import platform
from datetime import datetime

import torch
import transformers

import perturbkv
from perturbkv.configs import layer_types
from perturbkv.pipeline.run.plan import Plan
from perturbkv.schema import MEASURED
from perturbkv.selection.policies import kvpress


def provenance(planned: Plan) -> dict[str, str]:
    """Root attributes of the trace."""
    run, device, stored = planned.run, planned.placement.device, planned.files.stored
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    measured = layer_types.told(planned.files.config)
    return {
        "model": run.model,
        "revision": run.revision,
        "model_type": str(planned.files.config.model_type),
        "dataset": run.dataset,
        "seed": str(run.seed),
        "dtype": run.dtype,
        "weights": stored.as_run(run.dtype),
        "weights_stored": stored.detail,
        "quantised_weights": str(stored.quantised).lower(),
        "device": f"{device} ({hardware})",
        "device_map": planned.placement.device_map,
        "norm_kernel": planned.resources.norm_kernel,
        "random_weights": str(run.random_weights).lower(),
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "perturbkv_version": perturbkv.__version__,
        "torch_version": str(torch.__version__),
        "transformers_version": transformers.__version__,
        "python_version": platform.python_version(),
        **({MEASURED: measured} if measured else {}),
    } | ({"kvpress_version": kvpress.version()} if any(kvpress.is_press(one.policy) for one in run.configs) else {})
