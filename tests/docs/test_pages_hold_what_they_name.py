"""README is short, and every link, path, dotted name and Python block of the pages is there and works."""

from __future__ import annotations

import importlib
import re
from contextlib import chdir
from pathlib import Path

import pytest
import yaml

from perturbkv.selection.policies import registry
from tests.support.folders import model_folder
from tests.support.scripts import perturbkv

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")),
         *sorted((ROOT / "docs" / "how-to").glob("*.md"))]  # fmt: skip
MOST_LINES, WIDEST = 150, 120
FOLDERS = ("perturbkv", "analyses", "figures", "cli", "docs", "tests")
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
NAME = re.compile(r"\bperturbkv(?:\.[A-Za-z_]\w*)+")
PLACE = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./-]*")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEW = re.compile(r"^In a new file `([^`]+)`", re.MULTILINE)
"""Files that docs/extending.md tells a reader to make."""
DATA = re.compile(r"\.(h5|json|csv|parquet|png|svg|pdf|yaml)$")
"""What a command reads or leaves, though it begins with the package's name."""


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links whose file or whose heading is not there."""
    broken = []
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_dotted_name_is_there(page: Path) -> None:
    assert unresolved(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_is_there(page: Path) -> None:
    assert missing_places(page.read_text()) == []


def test_what_is_not_there_is_found() -> None:
    page = ROOT / "docs" / "faq.md"
    assert broken_links(page, "[a](nowhere.md) [b](faq.md#nothing) [c](faq.md#questions)") == [
        "nowhere.md",
        "faq.md#nothing",
    ]
    assert unresolved("`perturbkv.theory.bounds`, `perturbkv.theory.bonds`") == ["perturbkv.theory.bonds"]
    assert missing_places("`perturbkv/policies/snapkv.py`, `docs/faq.md`") == ["perturbkv/policies/snapkv.py"]


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in LINK.findall((ROOT / "README.md").read_text())}
    assert {page for page in PAGES if page.parent.name == "docs"} <= linked


def policy_rows(text: str) -> set[str]:
    """Rows of the table of policies, as they stand in a page."""
    return set(re.findall(r"^\| `[a-z0-9-]+` \| [^|]+ \| (?:uniform|by head|by layer) \| .*\|$", text, re.MULTILINE))


def test_the_page_on_usage_holds_every_policy_as_it_is_listed() -> None:
    expected = set()
    for policy in registry.known():
        own = ", ".join(f"`{name}`" for name in policy.options() if name not in ("pool", "kernel", "window_queries"))
        expected.add(f"| `{policy.name}` | {policy.summary_line()} | {policy.budgets} | {own} |")
    assert policy_rows((ROOT / "docs" / "usage.md").read_text()) == expected
    assert policy_rows("| `a` | b | by head | `c` |\n| d | e | uniform | |\n") == {"| `a` | b | by head | `c` |"}


def test_every_picture_is_shown() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert [path.name for path in (ROOT / "docs" / "figures").iterdir() if f"figures/{path.name}" not in text] == []


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `make demo` and `perturbkv export` leave, of a tiny model, and that model."""
    folder = tmp_path_factory.mktemp("demo")
    model_folder(folder / "tiny", positions=1100)
    with chdir(folder):
        asked = ["--model", "tiny", "--length", 300, "--samples", 2, "--budget", 64, "--format", "png"]
        perturbkv("heads", *asked, "--output", "runs/demo")
        perturbkv("export", "runs/demo/trace.h5")
    return folder


@pytest.mark.parametrize("name", ["README.md", "docs/trace.md", "docs/cluster.md", "docs/how-to/paper_figures.md"])
def test_every_python_block_runs(name: str, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = BLOCK.findall((ROOT / name).read_text())
    assert blocks
    monkeypatch.chdir(demo)
    exec(compile("\n".join(blocks).replace("smollm2-135m-q4_1", "tiny"), name, "exec"), {"__name__": "__main__"})


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
