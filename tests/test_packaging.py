"""Installations of the package: from a wheel, an sdist, and an editable install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import torch

import hostir as hi
from tests.launch import ROOT
from tests.test_repository import files_of_the_repository

BACKEND = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def clean() -> dict[str, str]:
    """Return the environment of a process without the modules of the repository."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def ran(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, env=clean(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the repository, because a build leaves files in its folder."""
    folder = tmp_path_factory.mktemp("source")
    for path in files_of_the_repository():
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return folder


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an sdist, and a wheel from the sdist, like `python -m build`; return their folder."""
    out = tmp_path_factory.mktemp("dist")
    ran(sys.executable, "-c", BACKEND, "build_sdist", out, cwd=source)
    (sdist,) = out.glob("*.tar.gz")
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (root,) = unpacked.iterdir()
    ran(sys.executable, "-c", BACKEND, "build_wheel", out, cwd=root)
    return out


def environment_of(folder: Path, *packages: str | Path) -> Path:
    """Make an environment with these packages, and the dependencies of this one; return its Python."""
    ran(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin/python"
    install = ("-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", "--no-build-isolation")
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "build_tools.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    ran(sys.executable, *install, *packages, cwd=folder.parent)
    return python


def test_the_wheel_has_version_license_and_type_information(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith("dist-info/METADATA")]
        fields = Parser().parsestr(archive.read(metadata).decode())
    assert fields["Version"] == hi.__version__
    assert fields["License-Expression"] == "Apache-2.0"
    assert {url.partition(",")[0] for url in fields.get_all("Project-URL", [])} >= {
        "Homepage",
        "Documentation",
        "Issues",
    }
    assert "hostir/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"hostir"}, "only the package"


@pytest.mark.slow
def test_the_demo_runs_from_a_wheel_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    python = environment_of(tmp_path / "venv", wheel)
    shutil.copy(ROOT / "examples/ag_matmul.py", tmp_path)
    where = ran(python, "-c", "import hostir; print(hostir.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path / "venv")
    small = ("--set", "M=64", "--set", "K=32", "--set", "N=32", "--compare", "--kernels", "aten")
    assert "hostir 1" in ran(tmp_path / "venv/bin/hostir", "lower", "ag_matmul.py", cwd=tmp_path)
    ran(tmp_path / "venv/bin/hostir", "run", "ag_matmul.py", *small, cwd=tmp_path)


USER = """import hostir as hi
from hostir.torch import overlap_pass

reveal_type(hi.__version__)
reveal_type(overlap_pass)
hi.parse(1)
"""
SETTINGS = """[mypy]
follow_imports = silent
[mypy-torch.*]
follow_imports = skip
"""  # without torch's own modules, which take longer than all others


@pytest.mark.slow
def test_mypy_finds_an_editable_install(source: Path, tmp_path: Path) -> None:
    python = environment_of(tmp_path / "venv", "-e", source)
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    command = (sys.executable, "-m", "mypy", "--python-executable", python, "user.py")
    done = subprocess.run(command, cwd=tmp_path, env=clean(), capture_output=True, text=True, check=False)
    assert 'Revealed type is "str"' in done.stdout.replace("builtins.", ""), done.stdout + done.stderr
    assert 'Revealed type is "hostir.torch.overlap.OverlapPass"' in done.stdout, done.stdout
    assert '"parse" has incompatible type "int"; expected "str"' in done.stdout, done.stdout
