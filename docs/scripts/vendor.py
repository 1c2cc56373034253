"""Renew the libraries that a report holds: python docs/scripts/vendor.py [PACKAGE=VERSION …], or `make vendor`.

npm fetches them, at the versions of `perturbkv/reporting/vendor/vendor.json` or at those that are given, and compares
them with the registry's integrity; of a version that is known already, this compares it with the one written down.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

VENDOR = Path(__file__).parents[2] / "perturbkv" / "reporting" / "vendor"
BUILDS = {
    "d3": ("d3.min.js", "dist/d3.min.js"),
    "@observablehq/plot": ("plot.min.js", "dist/plot.umd.min.js"),
}
"""Package -> the file here, and the file in the package, which is a build that makes a global name."""
_WHICH_BUNDLES = ("license", "licence", "copying")


@dataclass(frozen=True)
class Library:
    """A row of vendor.json: npm's integrity is of the whole package, sha256 of the file here."""

    package: str
    version: str
    file: str
    integrity: str = ""
    sha256: str = ""


def wanted(known: Sequence[Library], asked: Mapping[str, str]) -> list[Library]:
    """Return the libraries at the requested versions; one whose version changes has no integrity yet."""
    if unknown := sorted(asked.keys() - BUILDS.keys()):
        raise SystemExit(f"expected packages of {', '.join(BUILDS)}, got {', '.join(unknown)}")
    there = {one.package: one for one in known}
    return [_at(there.get(name, Library(name, "latest", file)), asked.get(name)) for name, (file, _) in BUILDS.items()]


def _at(library: Library, version: str | None) -> Library:
    same = version in (None, library.version)
    return library if same else replace(library, version=str(version), integrity="", sha256="")


def renewed(library: Library, modules: Path, lock: Mapping[str, Mapping[str, str]]) -> Library:
    """Return the row of what npm has fetched. Raises SystemExit where its integrity is not the recorded one."""
    told = lock[f"node_modules/{library.package}"]
    if library.integrity not in ("", told["integrity"]):
        raise SystemExit(
            f"expected {library.package} {library.version} with {library.integrity}, got {told['integrity']}"
        )
    held = (modules / library.package / BUILDS[library.package][1]).read_bytes()
    sha256 = hashlib.sha256(held).hexdigest()
    return replace(library, version=told["version"], integrity=told["integrity"], sha256=sha256)


def licences(modules: Path, lock: Mapping[str, Mapping[str, str]], roots: Sequence[str]) -> str:
    """Return every licence of what the builds hold, each text once, under the packages that have it."""
    held: dict[str, list[str]] = {}
    for name in _bundled(lock, roots):
        (path,) = [one for one in (modules / name).iterdir() if one.name.lower().startswith(_WHICH_BUNDLES)]
        text = "\n".join(line.rstrip() for line in path.read_text(encoding="utf-8").strip().splitlines())
        held.setdefault(text, []).append(f"{name} {lock[f'node_modules/{name}']['version']}")
    return "\n\n".join(f"{', '.join(names)}\n\n{text}" for text, names in held.items()) + "\n"


def _bundled(lock: Mapping[str, Mapping[str, str]], roots: Sequence[str]) -> list[str]:
    """Return the packages and what their builds take in, without those that only serve command lines."""
    own = {"commander", "iconv-lite", "rw", "safer-buffer", *roots}
    others = sorted(name for path in lock if path and (name := path.removeprefix("node_modules/")) not in own)
    return [*roots, *others]


def fetched(folder: Path, libraries: Sequence[Library]) -> dict[str, dict[str, str]]:
    """Return what npm has installed in the folder: the packages of its lock file."""
    (folder / "package.json").write_text('{"private": true}')
    names = [f"{one.package}@{one.version}" for one in libraries]
    subprocess.run(["npm", "install", "--ignore-scripts", "--save-exact", *names], cwd=folder, check=True)
    packages: dict[str, dict[str, str]] = json.loads((folder / "package-lock.json").read_text())["packages"]
    return packages


def read(path: Path = VENDOR / "vendor.json") -> list[Library]:
    """Return the rows that are written down."""
    return [Library(**row) for row in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []


def main(asked: Sequence[str]) -> None:
    """Fetch, compare, write."""
    libraries = wanted(read(), dict(one.rpartition("=")[::2] for one in asked))
    with tempfile.TemporaryDirectory(prefix="perturbkv-vendor-") as name:
        folder, modules = Path(name), Path(name) / "node_modules"
        lock = fetched(folder, libraries)
        rows = [renewed(one, modules, lock) for one in libraries]
        told = licences(modules, lock, [one.package for one in rows])
        for row in rows:
            shutil.copyfile(modules / row.package / BUILDS[row.package][1], VENDOR / row.file)
    (VENDOR / "LICENCES.txt").write_text(told, encoding="utf-8")
    (VENDOR / "vendor.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    sys.stdout.write("".join(f"{row.package} {row.version}\n" for row in rows))


if __name__ == "__main__":
    main(sys.argv[1:])
