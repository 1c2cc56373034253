"""Models as somebody may bring them: cut, junk, absurd, of another kind, or too large for the machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.attack import broken_configs, broken_folders, broken_ggufs, broken_places
from tests.attack.evenly import evenly
from tests.attack.running import Case
from tests.attack.spoiling import Spoiled
from tests.attack.tiny_runs import MODEL, TRACE, measured_or_refused, prompts, refused
from tests.support.folders import model_folder
from tests.support.gguf_files import gguf_file

COUNT = 240


def cases(workshop: Path, seed: int, count: int) -> Iterator[Case]:
    """Each spoils a tiny model of its own, a folder or a GGUF file, and measures it."""
    whole = {False: model_folder(workshop / "whole" / MODEL), True: gguf_file(workshop / "whole" / f"{MODEL}.gguf")}
    for place, spoiled in enumerate(evenly(_kinds(seed), seed, count)):
        folder = workshop / str(place)
        folder.mkdir()
        prompts(folder)
        model = folder / whole[spoiled.gguf].name
        if spoiled.gguf:
            shutil.copy(whole[True], model)
        elif spoiled.copied:
            shutil.copytree(whole[False], model)
        name = spoiled.spoil(model) or model.name
        words = spoiled.words or (str(name)[:100], "sample 'p'")
        fine = refused(*words) if spoiled.never else measured_or_refused(folder, *words)
        yield Case(spoiled.name, folder, (*TRACE, str(name)), fine)


def _kinds(seed: int) -> Mapping[str, Sequence[Spoiled]]:
    """Everything that is tried, by kind."""
    return {
        **broken_folders.kinds(),
        **broken_configs.kinds(),
        **broken_ggufs.kinds(seed),
        **broken_places.kinds(),
    }
