"""The stubs agree with the module, and type checkers find mistakes."""

import ast
import importlib.metadata
import importlib.resources
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import pinpool
import pinpool_loader
from readme_examples import examples

PYTHON = pathlib.Path(__file__).parents[1]


def test_the_stubs_have_every_method_every_setting_and_the_same_docstrings():
    stubs = importlib.resources.files(pinpool) / "_pinpool.pyi"
    assert (importlib.resources.files(pinpool) / "py.typed").is_file()
    classes = {node.name: node for node in ast.parse(stubs.read_text()).body if isinstance(node, ast.ClassDef)}
    for kind in (pinpool._pinpool.PoolCore, pinpool.Buffer, pinpool.SharedBuffer):
        methods = [node for node in classes[kind.__name__].body if isinstance(node, ast.FunctionDef)]
        declared = {node.name: node for node in reversed(methods)}  # The first overload has the docstring.
        public = {name for name in vars(kind) if not name.startswith("_")}
        assert {name for name in declared if not name.startswith("_")} == public
        assert ast.get_docstring(classes[kind.__name__]) == inspect.getdoc(kind)
        for name in public:
            docstring = inspect.getdoc(getattr(kind, name))
            assert docstring is not None and ast.get_docstring(declared[name]) == docstring, name
    assert all(inspect.getdoc(getattr(pinpool.Pool, name)) for name in dir(pinpool.Pool) if not name.startswith("_"))
    names = ["name", "env", *pinpool.Pool._setting_names()]
    assert list(pinpool.PoolSettings.__annotations__) == list(inspect.signature(pinpool.Pool).parameters) == names
    assert re.findall(r"^    (\w+): ", inspect.getdoc(pinpool.Pool).partition("Args:")[2].partition("Raises:")[0], re.M) == names
    of_loader = list(inspect.signature(pinpool_loader.Loader).parameters)
    assert [name for name in of_loader if name not in ("paths", "map")] == list(pinpool_loader.LoaderSettings.__annotations__)


USE = """
from typing import Unpack

import numpy as np
import torch

import pinpool.torch
import pinpool_loader

pool: pinpool.Pool = pinpool.torch.install(max_bytes="1GiB")
installed: pinpool.Pool | None = pinpool.torch.installed_pool()
num_blocks_in_use: int = pinpool.torch.uninstall()
shared = pinpool.SharedPool("1MiB", 4, library="numpy")
batches: pinpool.SharedBatches = shared.batches([shared.collate([np.zeros(3)])])
tensor: torch.Tensor = pool.empty((2, 3), torch.float32, library="torch")
also_tensor: torch.Tensor = pool.empty((2, 3), torch.float32)
loader = pinpool_loader.Loader("photos", batch_size=4, decode={"jpg": pinpool_loader.ImageDecoder(8, 8)}, even=True)
for batch in loader:
    number: int = batch.index_in_epoch
    batch.rng().random()
    pinpool.record_stream(batch.field("jpg"), 7)
lengths = pinpool_loader.Loader("photos", map=lambda batch: len(batch.labels))
for length in lengths:
    print(length + 1)
loader.load_state_dict(loader.state_dict())
cause: str = pool.diagnose().cause
alarms: list[str] = [name for name, diagnosis in pinpool.diagnose().items() if diagnosis.is_alarm]
print(len(batches), tensor.shape)

def first(paths: str, nbytes: pinpool.Size, timeout: pinpool.Time, **settings: Unpack[pinpool_loader.LoaderSettings]) -> pinpool_loader.Batch:
    shared.pool.get(nbytes, timeout=timeout)
    return next(iter(pinpool_loader.Loader(paths, **settings)))

moved: dict[str, torch.Tensor] = first("photos", 1 << 20, "1s", batch_size=4).to("cuda", non_blocking=True)
"""
#: Each line is a mistake that a type checker finds.
MISTAKES = [
    "batch.labls",
    "batch.feild('jpg')",
    "batch.index_in_epoch.upper()",
    "length.upper()",
    "loader.state()",
    "tensor.shap",
    "pinpool.Loader",
    "pinpool_loader.Loader('x', batchsize=4)",
    "pinpool.record_stream(tensor, 'main')",
    "pinpool_loader.ImageDecoder(8)",
    "pinpool.Pool(max_byts=1)",
    "pinpool.torch.install(max_byts=1)",
    "pinpool.torch.install(wait=[])",
    "pinpool.torch.instal()",
]


def run_checker(tmp_path, command, files, has_sources="site-packages" not in pinpool.__file__):
    sources = {"MYPYPATH": str(PYTHON / "python")} if has_sources else {}  # Otherwise the installed package is checked.
    done = subprocess.run([sys.executable, "-m", *command, *files], capture_output=True, text=True, env=os.environ | sources, cwd=tmp_path)
    return done.returncode, done.stdout + done.stderr


def programs(tmp_path):
    given = "from typing import Any\n\ndataset: Any\n\ndef train(images: Any, labels: Any) -> None: ...\n\n"
    texts = {
        "use": USE,
        "main": examples("README.md")[0],
        "python": examples("python/README.md")[2],
        "dataloader": given + examples("python/README.md")[0],
    }
    texts["mistakes"] = USE + "\n".join(MISTAKES) + "\n"
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    correct = [str(tmp_path / f"{name}.py") for name in texts if name != "mistakes"]
    return [*correct, *map(str, sorted(PYTHON.glob("examples/*.py")))], str(tmp_path / "mistakes.py")


def mistakes_found(output, pattern):
    first = len(USE.splitlines()) + 1
    lines = {int(line) for line in re.findall(pattern, output)}
    return [mistake for number, mistake in enumerate(MISTAKES) if first + number in lines]


def test_the_packages_the_examples_and_a_use_of_what_is_public_pass_mypy_strict(tmp_path):
    pytest.importorskip("mypy")
    pytest.importorskip("torch")
    correct, wrong = programs(tmp_path)
    strict = ["mypy", "--strict", "--ignore-missing-imports", f"--cache-dir={tmp_path / 'cache'}"]
    status, output = run_checker(tmp_path, strict, ["-p", "pinpool", "-p", "pinpool_loader"], has_sources=True)
    assert status == 0, output
    flags = [*strict[1:], "--follow-imports=silent"]
    status, output = run_checker(tmp_path, ["mypy", *flags], correct)
    assert status == 0, output
    status, output = run_checker(tmp_path, ["mypy", *flags], [wrong])
    assert mistakes_found(output, r"mistakes.py:(\d+): error") == MISTAKES, output


def test_pyright_finds_the_same_mistakes(tmp_path):
    pytest.importorskip("pyright")
    pytest.importorskip("torch")
    correct, wrong = programs(tmp_path)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(PYTHON / "python")], "pythonPlatform": "Linux"}))
    status, output = run_checker(tmp_path, ["pyright", "--pythonpath", sys.executable], [wrong])
    if "error" not in output:
        pytest.skip("pyright cannot run here: it downloads Node.js")
    assert mistakes_found(output, r"mistakes.py:(\d+):\d+ - error") == MISTAKES, output
    status, output = run_checker(tmp_path, ["pyright", "--pythonpath", sys.executable], correct[:1])
    assert status == 0, output


def test_an_installed_package_has_its_licenses_and_needs_numpy():
    try:
        installed = importlib.metadata.distribution("pinpool")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("it is not installed: pip install ./python")
    licenses = [file for file in installed.files or [] if "licenses" in file.parts]
    assert all(file.read_text() == (pathlib.Path(__file__).parents[2] / file.name).read_text() for file in licenses)
    names = {file.name for file in licenses}
    assert names == {"LICENSE-APACHE", "LICENSE-MIT"} and installed.metadata.get_all("License-File") == sorted(names)
    assert "numpy>=1.24" in (installed.requires or [])
