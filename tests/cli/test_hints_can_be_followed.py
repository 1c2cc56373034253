"""What an error suggests works: each suggestion is read out of the line and followed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perturbkv.datasets import needle
from tests.support.asked import instead, refused
from tests.support.folders import model_folder

Run = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]


def test_no_hint_installs_the_package_from_an_index_that_lacks_it() -> None:
    hint = re.compile(r"""pip install ['"]?perturbkv""")
    sources = [path for folder in ("perturbkv", "cli", "analyses", "figures") for path in (ROOT / folder).rglob("*.py")]
    pages = [*(ROOT / "docs" / "how-to").glob("*.md"), ROOT / "README.md"]
    assert len(sources) > 200
    assert [path for path in (*sources, *pages) if hint.search(path.read_text())] == []


def suggested(ran: Any, option: str) -> str:
    """The value that the line gives an option."""
    assert ran.code == 2, (ran.out, ran.err)
    found = re.search(rf"{option} ([\d.]+)", ran.err)
    assert found, ran.err
    return found[1].rstrip(".")


@pytest.fixture
def hidden(model: Path) -> list[object]:
    return ["--model", model, "--dataset", "needle", "--samples", 1, "--budget", 24, "--window", 8]


def test_a_length_beyond_the_model_is_refused_before_a_prompt_is_made(
    perturbkv: Run, hidden: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needle, "_sample", lambda *asked: pytest.fail("made"))
    refused(perturbkv("trace", *hidden, "--length", 999_999), "999,999 tokens", "model's 512 positions", "--max-tokens")
    start = time.monotonic()
    refused(perturbkv("trace", *hidden, "--length", 9_999_999, "--max-tokens", 200), "at most 2,000,000, got 9999999")
    assert time.monotonic() - start < 10


def test_the_length_that_fits_a_model_is_taken(perturbkv: Run, hidden: list[object]) -> None:
    ran = perturbkv("trace", *hidden, "--length", 5000)
    length = re.search(r"such as (\d+)", ran.err)
    assert length
    assert perturbkv("trace", *hidden, "--length", length[1], "--dry-run").code == 0


def test_the_length_that_leaves_room_for_a_haystack_is_taken(perturbkv: Run, hidden: list[object]) -> None:
    length = suggested(perturbkv("trace", *hidden, "--length", 150), "--length")
    assert perturbkv("trace", *hidden, "--length", length, "--dry-run").code == 0


@pytest.mark.parametrize("steps", [1, 9])
def test_the_cut_that_a_sliding_window_leaves_is_taken(
    perturbkv: Run, tiny: list[object], tmp_path: Path, steps: int
) -> None:
    sliding = model_folder(tmp_path / "sliding", "mistral", sliding_window=64)
    asked = instead(tiny, "--model", sliding, "--steps", steps, "--dry-run", "--no-chat-template")
    most = suggested(perturbkv("trace", *asked), "--max-tokens")
    assert int(most) == 64 - steps
    assert perturbkv("trace", *asked, "--max-tokens", most).code == 0
    refused(perturbkv("trace", *instead(tiny, "--model", sliding, "--steps", 63)), "use a model without one")


def test_head_scores_names_an_option_that_it_has(perturbkv: Run, model: Path) -> None:
    ran = perturbkv("trace", "--head-scores", "s.json", "--model", model, "--samples", 1, "--length", 510)
    length = suggested(ran, "--length")
    assert "--max-tokens" not in ran.err
    again = perturbkv("trace", "--head-scores", "s.json", "--model", model, "--samples", 1, "--length", length)
    assert "positions" not in again.err


def test_the_steps_that_record_one_are_taken(perturbkv: Run, tiny: list[object]) -> None:
    ran = perturbkv("heads", *tiny, "--step", 9, "--dry-run")
    steps = suggested(ran, "--steps")
    assert perturbkv("heads", *tiny, "--step", 9, "--steps", steps, "--dry-run").code == 0


def test_a_model_of_too_few_positions_suggests_no_negative_number(
    perturbkv: Run, tiny: list[object], tmp_path: Path
) -> None:
    short = model_folder(tmp_path / "short", positions=3)
    most = suggested(perturbkv("trace", *instead(tiny, "--model", short, "--steps", 1)), "--max-tokens")
    assert int(most) == 2
    ran = perturbkv("trace", *instead(tiny, "--model", short, "--steps", 3))
    refused(ran, "decode fewer tokens, or use a model of more positions")


@pytest.mark.slow
def test_more_configurations_than_a_run_takes_are_counted(perturbkv: Run, tiny: list[object], tmp_path: Path) -> None:
    several = [word for place in range(101) for word in ("--alpha", place / 100)]
    budgets = [word for place in range(100) for word in ("--budget", 24 + place)]
    asked = instead(tiny, "--window", 8)
    del asked[asked.index("--budget") : asked.index("--budget") + 2]
    ran = perturbkv("trace", *asked, *several, *budgets)
    refused(ran, "at most 10,000 configurations in a run, got 20,200")
    grids = "\n".join(
        f"- budget: [{', '.join(map(str, range(24, 1024)))}]\n  alpha: {place / 100}" for place in range(11)
    )
    (tmp_path / "sweep.yaml").write_text(f"grids:\n{grids}\n")
    refused(perturbkv("trace", *asked, "--config", "sweep.yaml"), "at most 10,000 configurations in a run, got 11,000")
    listed = ", ".join(map(str, range(24, 30_000)))
    (tmp_path / "sweep.yaml").write_text(f"budget: [{listed}]\n")
    refused(perturbkv("trace", *asked, "--config", "sweep.yaml"), "sweep.yaml: budget: ", "got 29,976")


@pytest.mark.parametrize("value", ["nan", "inf", "1e999", "1" + "0" * 20])
@pytest.mark.parametrize("option", ["--length", "--depth", "--samples", "--steps", "--seed", "--window", "--chunk-mib"])
def test_what_is_no_number_names_its_option(perturbkv: Run, hidden: list[object], option: str, value: str) -> None:
    refused(perturbkv("trace", *instead(hidden, option, value)), option.removeprefix("--"))


SIGNED = """
from dataclasses import dataclass
import perturbkv as pk

@dataclass(frozen=True)
class Below(pk.Score):
    \"\"\"A score below 0.\"\"\"
    needs = ("keys",)
    def score(self, layer):
        return -layer.keys[:, : layer.prefix].norm(dim=-1)
"""


@pytest.mark.parametrize(
    ("policy", "command"),
    [
        ("knorm", "heads"),
        ("knorm", "trace"),
        ("adakv(knorm)", "heads"),
        ("lava(by=knorm)", "trace"),
        ("below.py:Below", "trace"),
    ],
)
def test_the_commands_that_take_a_score_below_zero_are_named_and_run(
    perturbkv: Run, tiny: list[object], policy: str, command: str
) -> None:
    Path("below.py").write_text(SIGNED)
    ran = perturbkv(command, *tiny, "--policy", policy, "-o", "a.h5" if command == "trace" else "a")
    refused(ran, "below 0", "rank by it alone")
    Path("below.py").write_text(SIGNED.replace("needs =", "signed = True\n    needs ="))
    commands = re.findall(r"perturbkv (\w+) --policy (\S+) (--\S+) ([a-z,]+)", ran.err)
    assert [name for name, *_ in commands] == ["heads", "trace"]
    for name, *options in commands:
        words = ["--policy", *options] if name == "trace" else ["--policy", *options, "--dry-run"]
        followed = perturbkv(name, *tiny, *words, "-o", "b.h5" if name == "trace" else "b")
        assert followed.code == 0, followed.err
