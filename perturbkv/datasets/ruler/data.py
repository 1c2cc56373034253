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

from perturbkv.datasets.hub_data import hub_file
from perturbkv.datasets.registry import DATA_DIR_VARIABLE
from perturbkv.errors import DatasetError
from perturbkv.reading import FileKind

ESSAYS = "PaulGrahamEssays.json"
NAMES = {"dev-v2.0.json": "squad.json", "hotpot_dev_distractor_v1.json": "hotpotqa.json"}
"""A file as its address calls it -> as RULER calls it; either will do."""
FILE = FileKind("a JSON file (UTF-8)", DatasetError)
_ON_HUB = re.compile(r"https://huggingface\.co/datasets/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass(frozen=True)
class Data:
    """Answers what lm-eval's files ask for.

    Attributes:
        task: that asks, for errors.
        folder: where files are looked for first.
        record: filled with where they came from and their SHA-256.

    What was asked for once is not read again.
    """

    task: str
    folder: Path | None
    record: dict[str, str] = field(default_factory=dict)
    _held: dict[str, Any] = field(default_factory=dict)

    def load_dataset(self, repo: str, **more: Any) -> dict[str, list[str]]:
        """In place of `datasets.load_dataset`, of essays: their texts. Raises DatasetError."""
        if repo not in self._held:
            self._held[repo] = self._essays(repo)
        return {"text": self._held[repo]}

    def get(self, address: str, **more: Any) -> Any:
        """In place of `requests.get`, of a JSON file. Raises DatasetError."""
        if address not in self._held:
            self._held[address] = self._json(address)
        return SimpleNamespace(raise_for_status=lambda: None, json=lambda: self._held[address])

    def _essays(self, repo: str) -> list[str]:
        local = self._local(ESSAYS)
        if local is None:
            return self._texts(repo)
        found = FILE.read_json(local)
        text = found.get("text") if isinstance(found, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise FILE.refusal(local, "no object with `text` in it")
        self._note("file", text.encode())
        return [text]

    def _json(self, address: str) -> Any:
        name = address.rpartition("/")[2]
        known = NAMES.get(name, name)
        local = self._local(known) or self._local(name)
        path = local or self._fetched(address, known)
        found = FILE.read_json(path)
        self._note("file" if local else address, FILE.read_bytes(path))
        return found

    def _local(self, name: str) -> Path | None:
        if self.folder is None:
            return None
        places = [self.folder / inside / name for inside in ("", "ruler", "data")]
        return next((path for path in places if os.path.lexists(path)), None)

    def _fetched(self, address: str, local: str) -> Path:
        on_hub = _ON_HUB.fullmatch(address)
        if on_hub:
            return Path(hub_file(self.task, local, on_hub["repo"], on_hub["file"], on_hub["revision"]))
        msg = f"dataset '{self.task}' needs {local}; bring {address} as --data-dir DIR (or {DATA_DIR_VARIABLE})/{local}"
        raise DatasetError(msg)

    def _texts(self, repo: str) -> list[str]:
        """Of the hub's own conversion, whose layout is the same for every data set."""
        import pyarrow.parquet as parquet

        path = Path(hub_file(self.task, ESSAYS, repo, "default/train/0000.parquet", "refs/convert/parquet"))
        self._note(repo, path.read_bytes())
        return [str(text) for text in parquet.read_table(path, columns=["text"])["text"].to_pylist()]

    def _note(self, source: str, content: bytes) -> None:
        self.record.update(source=source, file_sha256=hashlib.sha256(content).hexdigest())
