"""README is short, every link, path and dotted name of the pages is there, and tables are those of the code."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.rows import REPORT
from perturbkv.analyses.audit.dump_verdict import DUMP_FAULTS
from perturbkv.cli.commands import COMMANDS
from perturbkv.selection.policies import registry
from tests.support.scripts import functions

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOTS = ROOT / "tests" / "cli" / "snapshots"
MADE = runpy.run_path(str(ROOT / "docs" / "scripts" / "reference_pages.py"))  # script("reference_pages")
BUILT = {
    ROOT / "docs" / name for name in {**MADE["command_pages"](), **MADE["notebooks"](), "reference/policies.md": ""}
}
"""Pages that a build of the site makes from the code."""
SITE = sorted(set((ROOT / "docs").glob("**/*.md")) - BUILT - set((ROOT / "docs" / "_build").glob("**/*.md")))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *SITE]
MOST_LINES, WIDEST = 100, 120
FOLDERS = ("perturbkv", "analyses", "figures", "cli", "studies", "docs", "tests")
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
NAME = re.compile(r"\bperturbkv(?:\.[A-Za-z_]\w*)+")
PLACE = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./-]*")
NEW = re.compile(r"^In a new file `([^`]+)`", re.MULTILINE)
"""Files that docs/how-to/extending.md tells a reader to make."""
DATA = re.compile(r"\.(h5|json|csv|parquet|png|svg|pdf|yaml)$")
"""What a command reads or leaves, though it begins with the package's name."""


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links whose file or whose heading is not there, in a clone that built no site."""
    broken = []
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if target in BUILT or not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)}


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or something inside one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def unresolved(text: str) -> list[str]:
    """Dotted names of ours that are not there, but for those in files that the page tells to make, and entry points."""
    text = re.sub(r"```toml.*?```", "", text, flags=re.DOTALL)
    made = [f"perturbkv.{path.removesuffix('.py').replace('/', '.')}" for path in NEW.findall(text)]
    names = [name for name in dict.fromkeys(NAME.findall(text)) if not DATA.search(name) and name not in made]
    return [name for name in names if not resolves(name)]


def missing_places(text: str) -> list[str]:
    """Paths of ours that a page names and that are not there, but for files that the page tells to make."""
    made = set(NEW.findall(text))
    places = {place.rstrip(".-") for place in PLACE.findall(LINK.sub("", text))} - made
    return sorted(place for place in places if not (ROOT / place).exists())


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= MOST_LINES
    assert [line for line in lines if len(line) > WIDEST] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
TYPED = re.compile(r"[(=]|^(?:perturbkv |pk\.)")
"""What a reader types: a call, an argument, a command or a public name; it need not be in the notebook."""


def cells(notebook: str, kind: str) -> list[Any]:
    return [cell for cell in json.loads(notebook)["cells"] if cell["cell_type"] == kind]


def unshown(notebook: str) -> list[str]:
    """Code words of a notebook's prose that neither its code nor its output has."""
    code = cells(notebook, "code")
    outputs = [output for cell in code for output in cell["outputs"]]
    shown = [{"text": "", **output, **output.get("data", {})} for output in outputs]
    texts = [one[kind] for one in shown for kind in ("text", "text/plain", "text/html") if kind in one]
    seen = "".join("".join(text) for text in (*texts, *(cell["source"] for cell in code)))
    prose = "".join("".join(cell["source"]) for cell in cells(notebook, "markdown"))
    return [word for word in re.findall(r"`([^`\n]+)`", prose) if word not in seen and not TYPED.search(word)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_quotes_is_shown_in_it(path: Path) -> None:
    assert unshown(path.read_text()) == []


def test_a_quotation_that_no_output_shows_is_found() -> None:
    text = (ROOT / "examples" / "first_look.ipynb").read_text()
    assert "The `cache share` is 0.37" in text
    assert unshown(text.replace("The `cache share` is 0.37", "`held 0.37`")) == ["held 0.37"]


def test_the_cloud_notebook_asks_for_its_address_before_it_installs(monkeypatch: pytest.MonkeyPatch) -> None:
    code = ["".join(cell["source"]) for cell in cells((ROOT / "examples" / "colab.ipynb").read_text(), "code")[:2]]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("subprocess.run", lambda *words, **more: pytest.fail("installed"))
    with pytest.raises(AssertionError, match="put the address of this repository, or of your copy, into SOURCE above"):
        exec("\n".join(code), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_dotted_name_is_there(page: Path) -> None:
    assert unresolved(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_is_there(page: Path) -> None:
    assert missing_places(page.read_text()) == []


def test_what_is_not_there_is_found() -> None:
    page = ROOT / "docs" / "how-to" / "faq.md"
    assert broken_links(
        page, "[a](nowhere.md) [b](faq.md#nothing) [c](faq.md#questions-and-answers-faq) [d](../reference/policies.md)"
    ) == [
        "nowhere.md",
        "faq.md#nothing",
        "../reference/policies.md",
    ]
    assert unresolved("`perturbkv.theory.bounds`, `perturbkv.theory.bonds`") == ["perturbkv.theory.bonds"]
    assert missing_places("`perturbkv/policies/snapkv.py`, `docs/how-to/faq.md`") == ["perturbkv/policies/snapkv.py"]


def test_every_page_of_the_site_is_in_the_list_of_its_folder() -> None:
    for page in SITE:
        index = page.parent / "index.md" if page.name != "index.md" else page.parents[1] / "index.md"
        if page != ROOT / "docs" / "index.md":
            linked = {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(index.read_text())}
            assert page in linked, f"{page} is not linked from {index}"


def test_the_page_on_policies_holds_every_policy_with_its_options() -> None:
    page = MADE["policy_page"]()
    for policy in registry.all_policies():
        assert f"| [`{policy.name}`](#{policy.name}) | {policy.summary_line()} | {policy.budgets} |" in page
        section = page.partition(f"## {policy.name}\n")[2].partition("\n## ")[0]
        assert re.findall(r"^\| `(\w+)` \| `", section, re.MULTILINE) == list(policy.options())


def test_the_pages_on_commands_hold_every_visible_option() -> None:
    pages = MADE["command_pages"]()
    assert {row.name for row in COMMANDS} == {Path(name).stem for name in pages} - {"index"}
    for row in COMMANDS:
        options = re.findall(r"^  (--[\w\[\]-]+)", (SNAPSHOTS / f"{row.name}_-h.txt").read_text(), re.MULTILINE)
        assert options or row.commands
        assert [option for option in options if f"`{option}" not in pages[f"reference/commands/{row.name}.md"]] == []


def test_a_build_removes_pages_of_what_is_no_more(tmp_path: Path) -> None:
    for name in ("reference/commands/former.md", "tutorial/former.ipynb", "tutorial/index.md", "reference/json.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("kept")
    MADE["write"](tmp_path)
    made = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")}
    assert made == {page.relative_to(ROOT / "docs").as_posix() for page in BUILT} | {
        "tutorial/index.md",
        "reference/json.md",
    }


def test_every_picture_is_shown() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert [path.name for path in (ROOT / "docs" / "figures").iterdir() if f"figures/{path.name}" not in text] == []


def test_hooks_before_a_commit_run_what_make_check_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in hooks] == ["local"]  # nothing is fetched
    entries = [hook["entry"] for hook in hooks[0]["hooks"]]
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile[makefile.index("\ncheck:") :].split("\n\n")[0].replace("$(VENV)", ".venv")
    for tool in ("ruff check", "ruff format --check", "mypy -p perturbkv"):
        assert tool in recipe
        assert any(tool in entry for entry in entries)


def test_the_citation_names_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    import perturbkv

    assert cited["version"] == perturbkv.__version__
    assert cited["license"] == "MIT"
    assert cited["references"][0]["url"] == "https://arxiv.org/abs/2502.03805"


ENGINES = Path(__file__).parents[2] / "docs" / "how-to" / "engines.md"


def test_every_kind_has_its_row() -> None:
    rows = [line for line in ENGINES.read_text().splitlines() if line.startswith("| `")]
    kinds = [row for row in rows if row.split("`")[1] in DUMP_FAULTS]
    assert kinds == [f"| `{kind}` | {meaning} |" for kind, meaning in DUMP_FAULTS.items()]


DOCS = Path(__file__).resolve().parents[2] / "docs"


def told_row(row: dict[str, Any]) -> str:
    """A row of the page's table: sizes with one digit, seconds with two."""
    value = f"{row['value']:.1f}" if row["bound"] >= 5 else f"{row['value']:.2f}"
    return f"| {row['what']} | {value} | {row['bound']:g} |"


def test_the_table_is_what_was_measured() -> None:
    measured = json.loads((DOCS / "bench" / "report.json").read_text())["rows"]
    assert [row["name"] for row in measured] == [target.name for target in REPORT]
    lines = (DOCS / "how-to" / "report.md").read_text().splitlines()
    begin = lines.index("| | measured | bound |") + 2
    assert lines[begin : begin + len(measured)] == [told_row(row) for row in measured]
    assert not lines[begin + len(measured)]


code_sizes = functions("code_sizes")


def total(text: str) -> int:
    (found,) = re.findall(r"Studies and benchmarks apart: ([\d,]+) statements", text)
    return int(found.replace(",", ""))


def test_every_file_counts_for_a_feature() -> None:
    paths = list(code_sizes["files"]())
    assert {path.partition("/")[0] for path in paths} >= {"perturbkv", "analyses", "figures", "cli", "studies", "tests"}
    assert {code_sizes["feature_of"](path) for path in paths} == set(code_sizes["FEATURES"])


def test_imports_and_docstrings_are_no_statements() -> None:
    tree = ast.parse('"""A."""\nimport os\n\ndef f():\n    """B."""\n    if os:\n        return 1\n    return 2\n')
    assert code_sizes["statements"](tree) == 4


def test_the_pages_total_is_at_most_five_per_cent_off() -> None:
    assert abs(total(code_sizes["PAGE"].read_text()) / total(code_sizes["table"]()) - 1) <= 0.05
