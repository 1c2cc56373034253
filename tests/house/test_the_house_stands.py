"""DESIGN's import arrows, checked from the syntax trees, and that each check can fail."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "perturbkv": "perturbkv",
    "analyses": "perturbkv.analyses",
    "figures": "perturbkv.figures",
    "cli": "perturbkv.cli",
}
FLOORS = (
    ("errors", "theory", "devices", "escaping", "captions", "display", "user_files"),
    ("configs", "memory", "kept_codec"),
    ("optimum",),
    ("schema", "models", "scoring"),
    ("trace",),
    ("selection", "datasets", "storage"),
    ("cache",),
    ("pipeline",),
    ("engines", "reporting", "analyses"),
    ("auditing", "selfcheck"),
    ("api",),
    ("cli",),
)
"""Each part imports itself and what lies on lower floors."""
NUMPY_SIDE = (
    "escaping", "errors", "captions", "display", "user_files", "configs", "kept_codec", "optimum", "schema", "trace",
    "storage", "analyses", "figures", "reporting",
)  # fmt: skip
"""What stays without torch, each importing itself and what stands before it."""
DOORS = ("perturbkv.auditing",)
"""Packages of which nobody else imports the modules inside."""
OUTSIDE = {"benchmarks", "studies", "tests"}
"""Folders beside the package that import it, and that no module of it imports."""
BY_NAME = {
    "perturbkv": "public names",
    "perturbkv.analyses.result": "the figure of a result",
    "perturbkv.analyses.stats": "public names",
    "perturbkv.auditing": "public names",
    "perturbkv.cli.command_line": "modules of commands",
    "perturbkv.configs.plugins": "modules of policies and scores",
    "perturbkv.datasets.external_code": "what a file of another package imports",
    "perturbkv.datasets.dataset_registry": "modules of data sets",
    "perturbkv.engines.work_items": "what a user registered, in another process",
    "perturbkv.figures": "modules of figures",
    "perturbkv.selection.policies.kvpress": "kvpress, where it is installed",
    "perturbkv.selection.policies.registry": "modules of policies",
    "perturbkv.trace": "what writes and converts traces",
}
"""Which modules import others by name, where no arrow shows, and what."""
TORCH = ("torch", "transformers", "jaxtyping")
KERNELS = "perturbkv.scoring.kernels"


@cache
def modules() -> dict[str, str]:
    """Dotted name -> source, of everything that is installed."""
    found = {}
    for folder, package in PARTS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *inside]).removesuffix(".__init__")] = path.read_text()
    return found


@cache
def imports(source: str, everywhere: bool = True) -> set[str]:
    """Dotted names that a source imports; without `everywhere` those at the top of the module alone."""
    tree = ast.parse(source)
    nodes = ast.walk(tree) if everywhere else iter(tree.body)
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def part(module: str) -> str:
    """perturbkv.analyses.heads.head_comparison -> analyses; perturbkv.theory -> theory."""
    return module.split(".")[1] if module.count(".") else ""


def ours(names: set[str]) -> set[str]:
    known = set(modules())
    return {part(name) for name in names if name in known and part(name)}


def allowed(mine: str) -> set[str]:
    """Parts that a part may import."""
    if mine in NUMPY_SIDE:
        return set(NUMPY_SIDE[: NUMPY_SIDE.index(mine) + 1])
    (place,) = [place for place, floor in enumerate(FLOORS) if mine in floor]
    return {mine, *(name for lower in FLOORS[:place] for name in lower)}


def forbidden(module: str, source: str) -> set[str]:
    """Parts that a module imports against the arrows; the command line imports what it likes of the package."""
    mine, outside = part(module), {name.partition(".")[0] for name in imports(source)} & OUTSIDE
    if mine in ("cli", ""):
        return outside
    return outside | ours(imports(source)) - allowed(mine)


def test_every_module_has_its_place() -> None:
    placed = {*NUMPY_SIDE, *(name for floor in FLOORS for name in floor)}
    assert {part(name) for name in modules()} - {""} == placed


@pytest.mark.parametrize("module", modules())
def test_arrows_go_one_way(module: str) -> None:
    assert forbidden(module, modules()[module]) == set()


@pytest.mark.parametrize(
    ("module", "line", "part_named"),
    [
        ("perturbkv.configs.run", "from perturbkv.storage.trace.trace_file import read_trace", "storage"),
        ("perturbkv.pipeline.sample.one_sample", "from perturbkv.analyses import heads", "analyses"),
        ("perturbkv.analyses.heads.head_comparison", "import perturbkv.figures.heads", "figures"),
        ("perturbkv.theory", "def f():\n    from perturbkv.cache import gather", "cache"),
        ("perturbkv.storage.trace.trace_file", "from perturbkv import cli", "cli"),
        ("perturbkv.trace", "from perturbkv.storage import views", "storage"),
        ("perturbkv.cli.commands.doctor", "def f():\n    from benchmarks import rows", "benchmarks"),
        ("perturbkv", "if TYPE_CHECKING:\n    import studies.alpha", "studies"),
    ],
)
def test_a_planted_arrow_is_found(module: str, line: str, part_named: str) -> None:
    assert part_named in forbidden(module, modules()[module] + "\n" + line)


def behind_doors(module: str, source: str) -> set[str]:
    """Modules that a module imports from inside a package of which it should import the door."""
    names = imports(source) & modules().keys()
    closed = [door for door in DOORS if not f"{module}.".startswith(f"{door}.")]
    return {name for name in names if any(name.startswith(f"{door}.") for door in closed)}


@pytest.mark.parametrize("module", modules())
def test_nobody_imports_behind_a_door(module: str) -> None:
    assert behind_doors(module, modules()[module]) == set()


@pytest.mark.parametrize(
    ("module", "line", "inside"),
    [
        ("perturbkv.cli.commands.audit", "def f():\n    import perturbkv.auditing.loss", "loss"),
        ("perturbkv.api.auditing", "from perturbkv.auditing.evictions import Eviction", "evictions"),
        ("perturbkv", "from perturbkv.auditing import changes", "changes"),
    ],
)
def test_a_planted_import_behind_a_door_is_found(module: str, line: str, inside: str) -> None:
    assert behind_doors(module, modules()[module] + "\n" + line) == {f"perturbkv.auditing.{inside}"}
    assert behind_doors("perturbkv.auditing.positions", line) == set()


STUDIES = ROOT / "studies"
LAYERS = {"perturbkv.pipeline.sample.prefill", "perturbkv.selection.resolved_config", "perturbkv.scoring.layer_view"}
"""A prefill's layers, which no trace holds."""
NOT_PUBLIC = {
    "model_sanity": {"perturbkv.datasets.needle"},  # the prose of needle's prompts, of which a model's loss is
    "readings": LAYERS - {"perturbkv.scoring.layer_view"},
    "template_window": LAYERS,
    "triattention": LAYERS,
}
"""Study -> modules of the package that it imports beside the public names."""


def not_public(source: str) -> set[str]:
    """Modules of ours that a source imports, but for the package's public names."""
    return {name for name in imports(source) if name in modules() and name != "perturbkv"}


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.py")), ids=lambda path: path.stem)
def test_a_study_imports_public_names_alone_and_is_one_script(path: Path) -> None:
    source = path.read_text()
    assert not_public(source) == NOT_PUBLIC.get(path.stem, set())
    assert source.count("\n") <= 450


def test_a_planted_private_import_of_a_study_is_found() -> None:
    line = "def f():\n    from perturbkv.analyses.measurements import Measurements"
    assert not_public(f"import perturbkv as pk\n{line}") == {"perturbkv.analyses.measurements"}
    assert not_public("import perturbkv as pk") == set()


def circle(sources: dict[str, str]) -> list[str]:
    """Modules in a ring of imports, or above one, lazy ones and a type checker's too; empty where there is none.

    The package itself hands out public names, and is left out.
    """
    arrows = {
        name: (imports(source) & sources.keys()) - {name, "perturbkv"}
        for name, source in sources.items()
        if name != "perturbkv"
    }
    while free := [name for name, targets in arrows.items() if not targets & arrows.keys()]:
        for name in free:
            del arrows[name]
    return sorted(arrows)


def test_no_modules_import_each_other() -> None:
    assert circle(modules()) == []


@pytest.mark.parametrize(
    ("module", "line", "other"),
    [
        (
            "pipeline.sample.capture",
            "def f():\n    from perturbkv.pipeline.sample import decoding",
            "pipeline.sample.decoding",
        ),
        ("analyses.needle.needle", "def f():\n    from perturbkv.figures import needle", "figures.needle"),
        ("trace", "def f():\n    from perturbkv.storage.trace import export", "storage.trace.export"),
        (
            "analyses.patching.patching",
            "if TYPE_CHECKING:\n    import perturbkv.figures.patching",
            "figures.patching",
        ),
    ],
)
def test_a_planted_circle_is_found(module: str, line: str, other: str) -> None:
    planted = {f"perturbkv.{module}": modules()[f"perturbkv.{module}"] + "\n" + line}
    assert {f"perturbkv.{module}", f"perturbkv.{other}"} <= set(circle(modules() | planted))


def imports_by_name(source: str) -> bool:
    """Whether a source uses `import_module` or `__import__`, by whatever name it has them."""
    nodes = list(ast.walk(ast.parse(source)))
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)} | imports(source)
    used |= {node.id for node in nodes if isinstance(node, ast.Name)}
    return not {"import_module", "importlib.import_module", "__import__"}.isdisjoint(used)


@pytest.mark.slow
def test_only_these_import_by_name() -> None:
    assert {name for name, source in modules().items() if imports_by_name(source)} == BY_NAME.keys()


@pytest.mark.parametrize(
    "line",
    [
        "import importlib\nimportlib.import_module('perturbkv.figures')",
        "def f():\n    from importlib import import_module as late\n    late('perturbkv.figures')",
        "__import__('perturbkv.figures')",
    ],
)
def test_a_planted_import_by_name_is_found(line: str) -> None:
    assert not imports_by_name(modules()["perturbkv.analyses.heads.head_comparison"])
    assert imports_by_name(modules()["perturbkv.analyses.heads.head_comparison"] + "\n" + line)


def uses_torch(source: str) -> bool:
    return any(name.split(".")[0] in TORCH for name in imports(source))


@pytest.mark.parametrize("module", [name for name in modules() if part(name) in (*NUMPY_SIDE, "datasets")])
def test_the_numpy_side_knows_no_torch(module: str) -> None:
    assert not uses_torch(modules()[module])
    assert uses_torch(modules()[module] + "\ndef f():\n    import torch")


def test_only_the_store_imports_h5py() -> None:
    found = [name for name, source in modules().items() if "h5py" in imports(source)]
    assert found == ["perturbkv.storage.trace.hdf5", "perturbkv.storage.trace.trace_writing"]


def imports_triton(source: str) -> bool:
    return any(name.split(".")[0] == "triton" for name in imports(source))


def names_a_kernel_at_its_top(source: str) -> bool:
    return any(name.startswith(KERNELS) for name in imports(source, everywhere=False))


def test_only_kernels_import_triton() -> None:
    assert {name.rpartition(".")[0] for name, source in modules().items() if imports_triton(source)} == {KERNELS}
    assert imports_triton("def f():\n    import triton.language as tl")


def test_kernels_are_imported_only_when_used() -> None:
    """From the syntax trees, as some builds of torch import Triton themselves."""
    others = {name: source for name, source in modules().items() if not name.startswith(KERNELS)}
    assert [name for name, source in others.items() if names_a_kernel_at_its_top(source)] == []
    assert names_a_kernel_at_its_top(
        others["perturbkv.scoring.value_norms"] + f"\nfrom {KERNELS} import projected_norms"
    )


def test_only_capture_and_the_proof_register_hooks_and_an_audit_puts_attention_back() -> None:
    def found(word: str) -> list[str]:
        return [name for name, source in modules().items() if word in source]

    assert found("register_forward") == [
        "perturbkv.models.proof.parts",
        "perturbkv.models.proof.projections",
        "perturbkv.models.proof.rotary",
        "perturbkv.pipeline.sample.capture",
    ]
    assert found("ALL_ATTENTION_FUNCTIONS") == ["perturbkv.cache.model_state", "perturbkv.models.interface"]


def torch_is_loaded_after(code: str) -> bool:
    check = f"import sys\n{code}\nsys.stdout.write(str('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    return done.stdout.endswith("True")


@pytest.mark.parametrize(
    "code",
    [
        "import perturbkv",
        "import perturbkv.storage.trace.trace_file, perturbkv.storage.run.writer",
        "\n".join(f"import {name}" for name in modules() if part(name) in ("analyses", "figures")),
        "import perturbkv.datasets.dataset_registry, perturbkv.selection.policies.registry, perturbkv.selection.grid",
        "from perturbkv.cli.main import app\nfrom typer.testing import CliRunner\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "assert CliRunner().invoke(app, ['heads', '--help']).exit_code == 0",
    ],
)
def test_torch_stays_unimported(code: str) -> None:
    assert not torch_is_loaded_after(code)


@pytest.mark.slow
def test_the_torch_check_can_fail() -> None:
    assert torch_is_loaded_after("import perturbkv.theory")


def declared(source: str) -> set[str]:
    """Names that a type checker sees in a module, though they are loaded when they are first used."""
    (block,) = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    return {
        alias.asname or alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }


def test_public_names_exist() -> None:
    import perturbkv

    for name in perturbkv.__all__:
        assert getattr(perturbkv, name) is not None
    assert declared((ROOT / "perturbkv" / "__init__.py").read_text()) == set(perturbkv.__all__) - {"__version__"}
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = perturbkv.nothing_of_this_name


@pytest.mark.slow
def test_prints_stay_in_the_console() -> None:
    calls = [
        name
        for name, source in modules().items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert calls == []
