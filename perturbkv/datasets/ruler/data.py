"""What RULER's tasks read: essays, SQuAD and HotpotQA, from --data-dir under RULER's own names, or from the hub.

lm-eval's files ask for them as they would ask the web; here they are answered.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from perturbkv.datasets.dataset_registry import DATA_DIR_VARIABLE
from perturbkv.datasets.hub_data import hub_file
from perturbkv.errors import DatasetError
from perturbkv.user_files import FileKind

ESSAYS = "PaulGrahamEssays.json"
NAMES = {"dev-v2.0.json": "squad.json", "hotpot_dev_distractor_v1.json": "hotpotqa.json"}
"""A file as its address calls it -> as RULER calls it; either will do."""
FILE = FileKind("a JSON file (UTF-8)", DatasetError)
_ON_HUB = re.compile(r"https://huggingface\.co/datasets/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass
class Data:
    """Answers what lm-eval's files ask for; what was asked for once is not read again.

    Attributes:
        task: that asks, for errors.
        folder: where files are looked for first.
        path: of the file that was read.
        record: where it came from and its SHA-256.
    """

    task: str
    folder: Path | None
    path: Path | None = None
    record: dict[str, str] = field(default_factory=dict)
    _held: dict[str, Any] = field(default_factory=dict)

    def load_dataset(self, repo: str, **more: Any) -> dict[str, list[str]]:
        """In place of `datasets.load_dataset`, of essays: their texts. Raises DatasetError."""
        if repo not in self._held:
            local = self._local(ESSAYS)
            self._held[repo] = self._essay(local) if local else self._essays(repo)
        return {"text": self._held[repo]}

    def get(self, address: str, **more: Any) -> Any:
        """In place of `requests.get`, of a JSON file. Raises DatasetError."""
        if address not in self._held:
            name = address.rpartition("/")[2]
            known = NAMES.get(name, name)
            local = self._local(known) or self._local(name)
            path = local or self._fetched(address, known)
            self._held[address] = FILE.read_json(self._noted(path, "file" if local else address))
        return SimpleNamespace(raise_for_status=lambda: None, json=lambda: self._held[address])

    def _local(self, name: str) -> Path | None:
        if self.folder is None:
            return None
        places = [self.folder / inside / name for inside in ("", "ruler", "data")]
        return next((path for path in places if os.path.lexists(path)), None)

    def _essay(self, path: Path) -> list[str]:
        """All of them in one, as RULER's own script leaves them."""
        found = FILE.read_json(self._noted(path, "file"))
        text = found.get("text") if isinstance(found, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise FILE.refusal(path, "no object with a text `text`")
        return [text]

    def _essays(self, repo: str) -> list[str]:
        """Of the hub's own conversion, whose layout is the same for every data set."""
        import pyarrow.parquet as parquet

        path = Path(hub_file(self.task, ESSAYS, repo, "default/train/0000.parquet", "refs/convert/parquet"))
        texts = parquet.read_table(self._noted(path, repo), columns=["text"])["text"].to_pylist()
        return [str(text) for text in texts]

    def _fetched(self, address: str, local: str) -> Path:
        on_hub = _ON_HUB.fullmatch(address)
        if on_hub:
            return Path(hub_file(self.task, local, on_hub["repo"], on_hub["file"], on_hub["revision"]))
        msg = (
            f"dataset '{self.task}' needs {local}, which no hub holds; bring it from {address} with --data-dir DIR "
            f"(or {DATA_DIR_VARIABLE}) holding {local}"
        )
        raise DatasetError(msg)

    def _noted(self, path: Path, source: str) -> Path:
        digest = hashlib.sha256(FILE.read_bytes(path)).hexdigest()
        self.path, self.record = path, {"source": source, "file_sha256": digest}
        return path
