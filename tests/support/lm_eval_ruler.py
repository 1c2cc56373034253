"""lm-eval's own RULER in a process of its own, without a network: `python lm_eval_ruler.py FOLDER`.

FOLDER holds `asked.json`, tasks and texts to grade, and the data that tasks read; `made.json` is left there. Each task,
length and seed is made in a fork, whose random numbers nothing has moved. Only the tokenizer and what fetches is
replaced, and 20 rows are made in place of 500.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import random
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MAKERS = {
    "vt": "vt_utils.get_vt_dataset",
    "cwe": "cwe_utils.get_cw_dataset",
    "fwe": "fwe_utils.fwe_download",
    "qa_squad": "qa_utils.get_squad",
    "qa_hotpot": "qa_utils.get_hotpotqa",
}
ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
ROWS = 4


def words(text: str, add_special_tokens: bool = True) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def unreachable(*address: Any, **more: Any) -> Any:
    raise OSError("no network")


def made(folder: Path, task: str, length: int, seed: int) -> list[dict[str, Any]]:
    import numpy as np
    from lm_eval.tasks.ruler import prepare_niah, qa_utils

    file, name = MAKERS.get(task, f"niah_utils.{task}").split(".")
    module = importlib.import_module(f"lm_eval.tasks.ruler.{file}")
    module.get_tokenizer = lambda name: lambda text: SimpleNamespace(input_ids=words(text))
    essays = json.loads((folder / "PaulGrahamEssays.json").read_text())
    prepare_niah.datasets.load_dataset = lambda *names, **more: {"text": [essays["text"]]}
    for one in (module, prepare_niah):
        one.tqdm = lambda places, **more: itertools.islice(places, 20)
    qa_utils.download_json = lambda url: json.loads((folder / url.rpartition("/")[2]).read_text())
    random.seed(seed)
    np.random.seed(1234)  # noqa: NPY002
    rows = getattr(module, name)(max_seq_lengths=[length])["test"]
    return [{key: rows[i][key] for key in ("input", "outputs", "gen_prefix")} for i in range(min(ROWS, len(rows)))]


def forked(folder: Path, place: int, *asked: Any) -> list[dict[str, Any]]:
    left = folder / f"rows-{place}.json"
    if not os.fork():
        sys.stdout = Path(os.devnull).open("w")
        code = 1
        try:
            left.write_text(json.dumps(made(folder, *asked)))
            code = 0
        finally:
            os._exit(code)
    assert os.wait()[1] == 0, asked
    rows: list[dict[str, Any]] = json.loads(left.read_text())
    return rows


def main(folder: Path) -> None:
    socket.socket.connect = socket.create_connection = socket.getaddrinfo = unreachable  # type: ignore[assignment,method-assign]
    from lm_eval.tasks.ruler import common_utils, cwe_utils, fwe_utils, niah_utils, qa_utils, vt_utils  # noqa: F401

    asked = json.loads((folder / "asked.json").read_text())
    rows = [forked(folder, place, *one) for place, one in enumerate(asked["tasks"])]
    scores = [
        [
            getattr(common_utils, name)({"outputs": answers, "max_length": 4096}, [text])["4096"]
            for text, answers in texts
        ]
        for name, texts in asked["texts"].items()
    ]
    (folder / "made.json").write_text(json.dumps({"rows": rows, "scores": scores}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
