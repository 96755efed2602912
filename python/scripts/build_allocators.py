#!/usr/bin/env python3
"""Compiles host_allocator.cpp for each minor version of torch that is supported, so that wheels need no compiler. Called by
build_wheels.sh; needs a C++ compiler, pip and PyPI.

    python build_allocators.py                                             # all versions; downloads torch's wheels, keeps the headers
    python build_allocators.py --only 2.11 --include .../torch/include     # one version, with existing headers
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "python/pinpool/torch"
SOURCE = PACKAGE / "host_allocator.cpp"
#: The libraries of torch that an allocator uses. torch has loaded them at run time.
LIBRARIES = ("c10", "torch_cpu")
#: A variable that newer libstdc++ headers read, and that glibc 2.28 lacks.
SINGLE_THREADED_SYMBOL = "__libc_single_threaded"


def run(*command):
    subprocess.run(list(map(str, command)), check=True)


def versions(oldest):
    """The newest release of each minor version from `oldest` on."""
    listing = subprocess.run([sys.executable, "-m", "pip", "index", "versions", "torch"], check=True, capture_output=True, text=True).stdout
    newest = {}
    for release in re.search(r"Available versions: (.*)", listing)[1].split(", "):
        newest.setdefault(tuple(map(int, release.split(".")[:2])), release)
    return {minor: release for minor, release in sorted(newest.items()) if minor >= oldest}


def headers(release, folder):
    """Downloads the wheel of a release and keeps its headers."""
    include = folder / release / "torch/include"
    if not include.is_dir():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", scratch, f"torch=={release}")
            with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
                wheel.extractall(folder / release, [name for name in wheel.namelist() if name.startswith("torch/include/")])
    return include


def compile_allocator(minor, include, out):
    compiler = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory() as scratch:
        for library in LIBRARIES:  # Empty libraries of the same names suffice for linking.
            run(compiler, "-shared", "-x", "c++", os.devnull, f"-Wl,-soname,lib{library}.so", "-o", f"{scratch}/lib{library}.so")
        single = Path(scratch) / "single.cpp"
        single.write_text("extern char pinpool_is_single_threaded;\nchar pinpool_is_single_threaded = 0;\n")
        target = out / f"torch_{minor[0]}_{minor[1]}.so"
        run(
            compiler, "-std=c++20", "-O2", "-fPIC", "-shared", "-s", f"-D{SINGLE_THREADED_SYMBOL}=pinpool_is_single_threaded",
            "-isystem", include, "-isystem", include / "torch/csrc/api/include", SOURCE, single,
            f"-L{scratch}", "-Wl,--no-as-needed", *(f"-l{library}" for library in LIBRARIES), "-o", target,
        )  # fmt: skip
    print(f"{target}: {target.stat().st_size} bytes", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--headers", type=Path, default=Path(os.environ.get("PINPOOL_TORCH_WHEELS", "target/torch")), help="folder for torch's headers"
    )
    parser.add_argument("--only", metavar="MINOR", help="one minor version, as 2.11")
    parser.add_argument("--include", type=Path, help="its headers")
    parser.add_argument("--out", type=Path, default=Path("target/prebuilt"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.include is not None:
        return compile_allocator(tuple(map(int, args.only.split("."))), args.include, args.out)
    args.headers.mkdir(parents=True, exist_ok=True)
    oldest = tuple(map(int, re.search(r"^_OLDEST_TORCH = \((\d+), (\d+)\)$", (PACKAGE / "_allocator.py").read_text(), re.M).groups()))
    for minor, release in versions(oldest).items():
        if args.only in (None, "{}.{}".format(*minor)):
            compile_allocator(minor, headers(release, args.headers), args.out)


if __name__ == "__main__":
    main()
