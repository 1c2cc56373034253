"""No test asks a hub for anything; huggingface_hub reads this when it is first imported."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"
