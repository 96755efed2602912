"""The typed stubs say what the module has."""

import ast
import importlib.metadata
import importlib.resources
import inspect
import os
import pathlib
import subprocess
import sys

import pytest

import pinpool
from test_readme import examples

PYTHON = pathlib.Path(__file__).parents[1]


def test_the_stubs_have_every_method_and_every_setting():
    stubs = importlib.resources.files(pinpool) / "_pinpool.pyi"
    assert (importlib.resources.files(pinpool) / "py.typed").is_file()
    classes = {node.name: node for node in ast.parse(stubs.read_text()).body if isinstance(node, ast.ClassDef)}
    for kind in (pinpool.Pool, pinpool.Buffer):
        declared = {node.name for node in classes[kind.__name__].body if isinstance(node, ast.FunctionDef)}
        has = {name for name in vars(kind) if not name.startswith("_")}
        assert declared - {name for name in declared if name.startswith("_")} == has
        assert all(inspect.getdoc(getattr(kind, name)) for name in has), "each has a docstring"
    new = next(node for node in classes["Pool"].body if getattr(node, "name", None) == "__new__")
    assert [arg.arg for arg in new.args.kwonlyargs] == ["name", "env", *pinpool.Pool.setting_names()]


def test_help_shows_the_settings():
    assert list(inspect.signature(pinpool.Pool).parameters) == ["name", "env", *pinpool.Pool.setting_names()]


USE = """
import pinpool.torch
import numpy as np

pool: pinpool.Pool = pinpool.torch.install(max_bytes="1GiB")
installed: pinpool.Pool | None = pinpool.torch.pool()
left: int = pinpool.torch.uninstall()
shared = pinpool.SharedPool("1MiB", 4, library="numpy")
batches: pinpool.Batches = shared.batches([shared.collate([np.zeros(3)])])
weights = pinpool.safetensors.load("w", 0, names=["a"], slices={"a": np.s_[1:, :3]})
shape: tuple[int, ...] = pinpool.safetensors.header("w").tensors["a"].shape
pinpool.record_stream(weights["a"], 7)
print(pinpool.why(), len(batches))
"""


def test_the_examples_and_a_use_of_what_is_public_pass_mypy_strict(tmp_path):
    pytest.importorskip("mypy")
    programs = {"use": "import pinpool.safetensors\n" + USE, "main": examples("README.md")[0], "python": examples("python/README.md")[1]}
    given = "from typing import Any\n\ndataset: Any\n\ndef train(images: Any, labels: Any) -> None: ...\n\n"
    programs["dataloader"] = given + examples("python/README.md")[0]
    for name, program in programs.items():
        (tmp_path / f"{name}.py").write_text(program)
    files = [*map(str, sorted(tmp_path.glob("*.py"))), *map(str, sorted(PYTHON.glob("examples/*.py")))]
    # Of what is installed the annotations count, not what is within.
    flags = ["--strict", "--follow-imports=silent", "--ignore-missing-imports", f"--cache-dir={tmp_path / 'cache'}"]
    installed = {**os.environ, "MYPYPATH": str(pathlib.Path(pinpool.__file__).parents[1])} if "site-packages" not in pinpool.__file__ else None
    done = subprocess.run([sys.executable, "-m", "mypy", *flags, *files], capture_output=True, text=True, env=installed, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_installed_package_has_its_licences_and_needs_numpy():
    try:
        installed = importlib.metadata.distribution("pinpool")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("it is not installed: pip install ./python")
    names = {file.name for file in installed.files or [] if "licenses" in file.parts}
    assert names == {"LICENSE-APACHE", "LICENSE-MIT"} and installed.metadata.get_all("License-File") == sorted(names)
    assert "numpy" in (installed.requires or [])
