"""README and docs/how-to: every shell and Python block runs, in order, page by page, in a folder with a tiny model.

The folder holds a tiny model under the embedded one's name, which commands and Python then find, so that blocks run as
they are written; its answers end early, as every second token ends one. One thing is changed, so that it takes seconds
(`shortened`): a command that measures takes 2 samples (4 where it needs them). What a page shows after "In a file
`name`:" is written to the folder first.
"""

from __future__ import annotations

import json
import random
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

from perturbkv.cli.commands import COMMANDS
from tests.support import ruler_data
from tests.support.commands import command_of, every_command
from tests.support.folders import model_folder
from tests.support.pages import HOW_TO, ROOT, blocks, shell
from tests.support.screens import Ran, run
from tests.support.scripts import study
from tests.support.undrawn import undrawn

PAGES = [ROOT / "README.md", *sorted(HOW_TO.glob("*.md"))]
ELSEWHERE = {
    ("cluster.md", "sh"): (
        "tests/shards/test_the_page_on_clusters_works.py",
        "tests/cluster/test_workers_measure_what_one_process_does.py",
        "tests/cluster/test_ray_measures_what_one_process_does.py",
    ),
    ("extending.md", "python"): ("tests/docs/test_extending_works.py",),
}
"""Page and language -> the tests that run these blocks instead."""
CONSOLE = {
    ("audit.md", "perturbkv audit kvpress:"): "kvpress needs an older transformers; tests/kvpress audits presses",
    ("engines.md", "perturbkv audit faulty_dump"): "a dump with a fault; the page writes a right one",
    ("engines.md", "perturbkv audit slot.bin"): "llama.cpp has an environment of its own; tests/llamacpp runs it",
    ("engines.md", "perturbkv audit vllm:"): "vLLM has an environment of its own; tests/vllm runs it",
    ("kvpress.md", "perturbkv heads"): "kvpress needs an older transformers; tests/kvpress measures presses",
}  # fmt: skip
"""Page and a command of its ```console blocks, by how it begins -> why it cannot run here. The options are checked."""
GOES_ON = dict.fromkeys(("light_reading.md", "paper_figures.md", "report.md", "traces.md"), "make demo")
"""Page -> what its reader ran before."""
TASK = "SLURM_ARRAY_TASK_ID=1\n"
"""What SLURM sets for a batch file, which stands in a ```bash block."""
LANGUAGES = {"sh", "tex", "bash", "python", "console", "json", "text", "toml", "yaml", "{toctree}"}
CODES = {"audit examples/my_cache.py:evict_wrongly": (1,), "audit kept.npz": (2,), "budget": (0, 1)}
"""Command, by how it begins -> exit codes that its page tells of."""
UNABLE = "(score 0)"
"""What `budget --max-drop` says of random weights, which answer nothing; exit code 2."""
MAKEFILE = (ROOT / "Makefile").read_text()
TEMPLATE = "{% for turn in messages %}{{ turn['role'] }}: {{ turn['content'] }}\n{% endfor %}A:"


def words_of(line: str) -> tuple[str, ...]:
    """The words of a line that are a command's name."""
    given = shlex.split(line)[1:]
    known = [words for words in every_command() if tuple(given[: len(words)]) == words]
    return max(known, key=len, default=())


def options_of(words: tuple[str, ...]) -> set[str]:
    """The options of a command; none where no command has these words."""
    return {
        name
        for option in (command_of(words).params if words else ())
        for name in (*option.opts, *option.secondary_opts)
    }


def shortened(given: list[str]) -> list[str]:
    """The command with 2 samples, where it measures."""
    words = words_of(shlex.join(["perturbkv", *given]))
    reads = [word for place, word in enumerate(given) if word.endswith((".h5", "generation.jsonl", "my_dump"))
             and given[place - 1] not in ("-o", "--output")]  # fmt: skip
    if reads or "--samples" not in options_of(words):
        return given
    if "--samples" not in given:
        return [*given, "--samples", "2"]
    place = given.index("--samples") + 1
    return [*given[:place], str(min(2, int(given[place]))), *given[place + 1 :]]


def perturbkv(*given: str) -> Ran:
    """A command of a page; one that ends as its page says has, for the shell, succeeded."""
    ran = run(*shortened([*given]))
    codes = next((codes for begun, codes in CODES.items() if " ".join(given).startswith(begun)), (0,))
    documented = ran.code in codes or (given[0] == "budget" and UNABLE in ran.err)
    return Ran(0, ran.out, ran.err) if documented else ran


def make(target: str) -> Ran:
    """`make X`: X is a target; of `make demo` what it measures is run."""
    assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
    recipe = re.search(r"^demo: install\n\t\$\(BIN\) (.*)$", MAKEFILE, re.MULTILINE)
    assert recipe
    return perturbkv(*shlex.split(recipe[1])) if target == "demo" else Ran(0, "", "")


def python(*given: str) -> Ran:
    """A study, on four prompts."""
    return Ran(0, study(Path(given[0]).stem, *given[1:], "--short"), "")


def pip(*given: str) -> Ran:
    """`pip install X[extra]`: the extra is one of ours."""
    assert given[0] == "install"
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.findall(r"(?:perturbkv|\.)\[(.+)\]", " ".join(given))
    assert {extra for extras in asked for extra in extras.split(",")} <= set(known)
    return Ran(0, "", "")


def furnish(folder: Path) -> None:
    """What the pages assume: the model, a checkout's folders, LongBench's and RULER's files."""
    model = model_folder(folder / "smollm2-135m-q4_1", layers=6, positions=8192)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(0, 260, 2)]}))
    (folder / "llama-3.1-8b").symlink_to(model)
    for name in ("docs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    for name in (".venv/bin", "LongBench/data", "folder"):
        (folder / name).mkdir(parents=True)
    (folder / ".venv/bin/activate").touch()
    for name in ("multi_news", "qasper"):
        rows = [
            {"_id": f"{name}-{i}", "input": "How is it?", "context": f"{i} {ruler_data.prose(random.Random(i), 20)}",
             "answers": ["slow"]}
            for i in range(2)
        ]  # fmt: skip
        (folder / "LongBench/data" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ruler_data.write(folder / "folder")
    rows = [{"id": f"p{i}", "prompt": ruler_data.prose(random.Random(i), 10)} for i in range(2)]
    (folder / "part-1.jsonl").write_text("\n".join(map(json.dumps, rows)))


def run_page(name: str, page: str, folder: Path) -> None:
    """Run the page's blocks in order. Raises AssertionError with the command that fails, or what Python raises."""
    programs: dict[str, Callable[..., Ran]] = {"perturbkv": perturbkv, "make": make, "pip": pip, "python": python}
    found, names = blocks(page), {"__name__": "__main__"}
    for block in found:
        if block.file:
            (folder / block.file).write_text(block.text)
    if name in GOES_ON:
        shell(GOES_ON[name], folder, programs)
    for block in found:
        if block.file or (name, block.language) in ELSEWHERE:
            continue
        if block.language in ("sh", "bash"):
            shell(f"{TASK if block.language == 'bash' else ''}{block.text}", folder, programs)
        if block.language == "python":
            exec(compile("\n" * block.line + block.text, name, "exec"), names)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERTURBKV_CACHE", str(tmp_path / "cache"))
    with undrawn():
        yield tmp_path
    plt.close("all")


def runs(page: Path) -> bool:
    """Whether the page has a block that is run here."""
    here = {"sh", "bash", "python"} - {language for name, language in ELSEWHERE if name == page.name}
    return any(block.language in here and not block.file for block in blocks(page.read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if runs(page)], ids=lambda page: page.name)
def test_every_block_runs(page: Path, folder: Path) -> None:
    run_page(page.name, page.read_text(), folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "right", "wrong", "said"),
    [
        ("compare.md", "-o runs/compare", "-o runs/compare --budgget 3", "No such option: --budgget"),
        ("compare.md", "--methods adakv,", "--methods adak,", "adak"),
        ("compare.md", "perturbkv ablation", "perturbkv restriction", "No such command"),
        ("report.md", "runs/noise/trace.h5", "runs/nowhere/trace.h5", "runs/nowhere/trace.h5"),
        ("answers.md", "chats/generation.jsonl --divergence", "chats/generated.jsonl --divergence", "generated.jsonl"),
        ("cluster.md", "pk.load_model", "pk.open_model", "open_model"),
        ("install.md", "make demo\n", "make demonstration\n", "demonstration"),
        ("kvpress.md", ".[kvpress]", ".[presses]", "presses"),
    ],
)
def test_a_page_that_is_wrong_fails(name: str, right: str, wrong: str, said: str, folder: Path) -> None:
    page = (HOW_TO / name).read_text()
    assert right in page
    with pytest.raises((AssertionError, AttributeError), match=re.escape(said)):
        run_page(name, page.replace(right, wrong), folder)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is(page: Path) -> None:
    text = page.read_text()
    found = blocks(text)
    assert [block for block in found if block.language not in LANGUAGES] == []
    assert len(re.findall(r"^\s*```", text, re.MULTILINE)) == 2 * len(found)
    for (name, language), tests in ELSEWHERE.items():
        assert name != page.name or any(block.language == language for block in found)
        assert all((ROOT / test).exists() for test in tests)


def test_what_cannot_run_is_listed_with_its_reason_and_has_right_options() -> None:
    listed = set()
    for page in PAGES:
        for block in blocks(page.read_text()):
            joined = block.text.replace("\\\n", " ") if block.language == "console" else ""
            for line in re.findall(r"^\$ (.*)$", joined, re.MULTILINE):
                words = shlex.split(line, comments=True)
                known = options_of(words_of(line))
                assert known, line
                assert [word for word in words if word.startswith("-") and word not in known] == []
                reasons = [key for key in CONSOLE if key[0] == page.name and " ".join(words).startswith(key[1])]
                assert reasons, line
                listed |= {*reasons}
    assert listed == set(CONSOLE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_in_the_text_is_in_the_table(page: Path) -> None:
    assert unknown_commands(page.read_text()) == []


def unknown_commands(text: str) -> list[str]:
    """The words after `perturbkv`, in backticks or where a line begins, that are no command; a page may add one."""
    names = {row.name for row in COMMANDS} | {*re.findall(r'Command\("([\w-]+)"', text)}
    return [name for name in re.findall(r"(?:`|^\$? ?)perturbkv ([a-z][a-z-]*)(?![\w.:/])", text, re.MULTILINE)
            if name not in names]  # fmt: skip


def test_commands_that_are_not_in_the_table_are_found() -> None:
    assert unknown_commands("`perturbkv info x.h5`, `perturbkv heads`\nperturbkv link\n") == ["info", "link"]
