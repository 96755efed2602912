"""`pinpool.torch.install`, through torch's C++ interface for host allocators, since torch pins no memory without a GPU.

Needs torch and a C++ compiler. Each test is a separate process, because a process has one allocator.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from helpers import run_python
from mock_driver import MOCK_DRIVER, PRELUDE, mock_driver_environment

SUPPORT, SCRIPTS = Path(__file__).parent / "support", Path(__file__).parents[1] / "scripts"
REQUIRED = os.environ.get("PINPOOL_REQUIRE_TORCH") == "1"


FOUND = {
    "torch": importlib.util.find_spec("torch"),
    "a C++ compiler": shutil.which(os.environ.get("CXX", "c++")),
    "ninja": importlib.util.find_spec("ninja") or shutil.which("ninja"),
}
if not all(FOUND.values()) and not REQUIRED:
    pytest.skip(f"SKIPPED: not installed: {', '.join(name for name, found in FOUND.items() if not found)}", allow_module_level=True)

PREAMBLE = f"""
import ctypes, sys, threading
sys.path.insert(0, {str(SUPPORT)!r})
from host_probe import Probe
import pinpool, pinpool.torch
probe = Probe()
MIB = 1 << 20
"""


def run(code, **environment):
    """Runs the code in a separate process and returns its output."""
    paths = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return run_python("-c", PREAMBLE + textwrap.dedent(code), env={**os.environ, **paths, **environment})[0]


def test_blocks_come_from_the_pool_and_return_to_it():
    run("""
        pool = pinpool.torch.install(max_bytes="64MiB", backend="heap")
        assert pinpool.torch.installed_pool() is pool
        first = probe.allocate(3 * MIB)
        assert pool.stats()["memory"]["in_use"] == 1
        first_address = first.address
        first.free()
        assert pool.stats()["memory"]["in_use"] == 0
        second = probe.allocate(3 * MIB)
        assert second.address == first_address, "a hit"
        assert pool.stats()["requests"]["hits"] == 1
        empty = probe.allocate(0)
        assert empty.address is None
        empty.free()
        assert pinpool.torch.uninstall() == 1 and pinpool.torch.installed_pool() is None
        threading.Timer(0.05, second.free).start()
        assert pinpool.torch.uninstall(timeout="300s") == 0
    """)


def test_a_full_pool_raises_torchs_out_of_memory_error_with_a_remedy():
    run("""
        pool = pinpool.torch.install(max_bytes="4MiB", backend="heap", on_full="error", wait="0")
        held = probe.allocate(3 * MIB)
        error = probe.fails_to_allocate(3 * MIB)
        assert error.startswith("OutOfMemoryError: ") and "PINPOOL_MAX_BYTES" in error, error
        held.free()
        probe.allocate(3 * MIB).free()
    """)


def test_a_request_in_a_forked_child_is_not_an_out_of_memory_error():
    run("""
        import os
        pinpool.torch.install(backend="heap")
        child = os.fork()
        if child == 0:
            error = probe.fails_to_allocate(8)
            os._exit(0 if error.startswith("pinpool: the pool belongs to process") else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """)


def test_a_refused_install_leaves_no_pool():
    run("""
        import logging
        from helpers import until
        lines, logger = [], logging.getLogger("pinpool")
        logger.setLevel(logging.INFO)
        logger.addFilter(lambda record: lines.append(record.getMessage()))
        def refused(text):
            try: pinpool.torch.install(name="refused", backend="heap", reserve=MIB)
            except pinpool.AlreadyInstalledError as error: assert text in str(error), error
            else: raise SystemExit("accepted")
        pinpool.torch.install(backend="heap")
        block = probe.allocate(8)
        assert pinpool.torch.uninstall() == 1
        refused("tensors still use memory")
        block.free()
        assert pinpool.torch.uninstall() == 0
        probe.raise_priority()
        refused("higher priority")
        until(lambda: any("pool[refused] pool_ended" in line for line in lines))
        assert sum("pool[refused] created" in line for line in lines) == 1, "no pool is created for the first refusal"
    """)


def test_a_freed_block_waits_for_the_streams_that_used_it():
    calls = run("""
        functions = probe.install_recorder()
        block = probe.allocate(1000)
        assert probe.record_event(block.address + 10, None, stream=1)
        assert probe.record_event(block.address, block.context, stream=1), "the same again"
        assert probe.record_event(block.address + 999, None, stream=2, device=1)
        assert not probe.record_event(block.address + 1000, None, stream=3), "behind the block"
        block.free()
        print(probe.calls())
    """)
    assert calls.split("\n")[:2] == ["get 1000", "put 0:101 1:102"]


@pytest.mark.skipif(MOCK_DRIVER is None, reason="the mock driver is not built")
def test_a_copy_of_a_tensor_from_another_pool_is_recorded(tmp_path):
    code = """
        pool, shared, stream = pool_of(), pinpool.SharedPool(SIZE, 2, pool=pool_of()), new_stream()
        tensor, received = pool.empty(SIZE, "uint8", library="torch"), memoryview(shared.receive(shared.get(SIZE).send()))
        addresses = tensor[10:].data_ptr(), np.asarray(received).ctypes.data + 10
        pinpool.torch.install(pool_of())
        hold(stream)
        assert all(probe.record_event(address, None, stream=stream - 100) for address in addresses)
        del tensor, received
        assert buffer_counts(pool)[0] == buffer_counts(shared.pool)[0] == 1 == shared.counts()["free"]
        let_run(stream)
        wait_for_counts(pool, (0, 0, 1))
        wait_for_counts(shared.pool, (0, 0, 0))
        assert shared.counts()["free"] == 2
    """
    run(PRELUDE + textwrap.dedent(code), LD_LIBRARY_PATH=mock_driver_environment(tmp_path)["LD_LIBRARY_PATH"])


@pytest.mark.parametrize(
    ("trouble", "calls"),
    [("is_capturing", "get 9\nput\n"), ("is_lost", "get 9\nput\n"), ("refuses_streams", "refused\nrefused\nget 9\nrefused\nput\n")],
)
def test_a_block_is_kept_until_its_stream_can_be_recorded(trouble, calls):
    run(f"""
        functions = probe.install_recorder()
        block = probe.allocate(8)
        probe.record_event(block.address, block.context, stream=7)
        probe.set({trouble!r}, True)
        block.free()
        probe.allocate(9).free()
        assert probe.calls() == "get 8\\n" + {calls!r}
        probe.set({trouble!r}, False)
        probe.empty_cache()
        assert probe.calls() == "put 0:107\\ntrim\\n"
    """)


def test_uninstall_returns_blocks_whose_stream_captured_when_they_were_freed():
    run("""
        functions = probe.install_recorder()
        block = probe.allocate(8)
        assert probe.record_event(block.address, block.context, stream=7)
        probe.set("is_capturing", True)
        block.free()
        assert probe.uninstall() == 1, "nothing else would return the block"
        probe.set("is_capturing", False)
        assert probe.uninstall() == 0
        assert probe.calls() == "get 8\\nput 0:107\\n"
    """)


def test_uninstall_still_serves_blocks_in_use():
    run("""
        own = probe.allocator()
        assert pinpool.torch.uninstall() == 0, "nothing is installed"
        functions = probe.install_recorder()
        ours = probe.allocator()
        assert ours != own
        block = probe.allocate(8)
        assert probe.uninstall() == 1
        assert probe.allocator() == ours, "it knows the streams of the block"
        assert probe.record_event(block.address, block.context, stream=7)
        block.free()
        assert probe.calls() == "get 8\\nput 0:107\\n"
        assert probe.uninstall() == 0
        assert probe.allocator() == own
        again = probe.install_recorder()
        probe.allocate(9).free()
        assert probe.calls() == "get 9\\nput\\n"
    """)


def test_a_block_requested_during_uninstall_is_not_lost():
    run("""
        own, functions = probe.allocator(), probe.install_recorder()
        left = []
        uninstall = ctypes.CFUNCTYPE(None)(lambda: left.append(probe.uninstall()))
        probe.during_get(uninstall)
        probe.fails_to_allocate(8)  # torch's own allocator needs a GPU.
        assert left == [0] and probe.allocator() == own
        assert probe.calls() == "get 8\\nput\\n", "the block returns to the pool"
    """)


def test_another_allocator_with_a_higher_priority_is_named_each_time():
    run("""
        probe.raise_priority()
        for _ in range(2):
            try:
                pinpool.torch.install(backend="heap")
                raise SystemExit("accepted")
            except pinpool.AlreadyInstalledError as error:
                assert "higher priority" in str(error), error
    """)


def test_statistics_are_in_torchs_form():
    run("""
        pool = pinpool.torch.install(backend="heap")
        blocks = [probe.allocate(MIB), probe.allocate(2 * MIB)]
        blocks.pop().free()
        stats = probe.stats()
        assert stats["active_requests"] == (1, 2, 2, 1), stats
        assert stats["active_bytes"] == (MIB, 3 * MIB, 3 * MIB, 2 * MIB), stats
        ours = pool.stats()
        assert stats["allocated_bytes"] == ours["memory"]["held_bytes"]
        assert stats["num_host_alloc"] == ours["memory"]["pin"]["count"] > 0
        probe.reset_stats()
        stats = probe.stats()
        assert stats["active_requests"] == (1, 1, 0, 0) and stats["num_host_alloc"] == 0, stats
    """)


def test_snapshots_have_the_blocks_and_their_history():
    run("""
        pinpool.torch.install(max_bytes="4MiB", on_full="error", wait="0", backend="heap")
        probe.record_history(True)
        kept = probe.allocate(8)
        probe.allocate(9).free()
        probe.fails_to_allocate(64 * MIB)
        import torch
        has_history = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 15)
        assert probe.history() == ("aarfo" if has_history else "")
        assert probe.segments() == (1 if has_history else 0)
        probe.set("has_no_context", True)
        kept.free()  # Called by a destructor, so an exception would end the process.
        assert probe.history() == ("aarforf" if has_history else "")
    """)


def test_threads_allocate_use_and_free_at_once():
    run("""
        import threading
        pool = pinpool.torch.install(backend="heap", max_bytes="256MiB")
        wrong = []
        def work(seed):
            for turn in range(300):
                size = 1 + (seed * 7919 + turn * 104729) % (1 << 20)
                block = probe.allocate(size)
                assert block.address % 64 == 0
                ctypes.memset(block.address, seed, size)
                if ctypes.string_at(block.address, size).count(bytes([seed])) != size:
                    wrong.append((seed, turn))
                block.free()
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 9)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not wrong
        assert pool.stats()["memory"]["in_use"] == 0 and probe.stats()["active_requests"][0] == 0
    """)


def test_blocks_may_outlive_the_interpreter():
    run("""
        pinpool.torch.install(backend="heap")
        import builtins
        builtins.kept = probe.allocate(MIB)
    """)


def test_ninja_is_found_and_a_failed_build_may_be_repeated(tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exec c++ --version\nexit 1\n')
    compiler.chmod(0o755)
    code = f"""
        import hashlib, os, pathlib, sys
        import pinpool.torch
        changed = []
        sys.addaudithook(lambda event, arguments: event == "os.putenv" and changed.append(arguments[0]))
        pinpool.torch._allocator._PREBUILT = pathlib.Path("/none")  # As if the wheel contained none for this version.
        for compiler in ("/bin/false", {str(compiler)!r}, {str(compiler)!r}):
            os.environ["CXX"] = compiler
            try: pinpool.torch.install(backend="heap")
            except pinpool.BackendError as error: assert "non-zero exit status" in str(error) or "Error building" in str(error), error
            else: raise AssertionError("it compiled")
        del os.environ["CXX"]
        for _ in range(2):
            pinpool.torch.install(backend="heap")
            pinpool.torch.uninstall()
        assert set(changed) == {{b"CXX"}}, "the environment of this process stays as it is"
        source = hashlib.sha256(pinpool.torch._allocator._SOURCE.read_bytes()).hexdigest()
        assert source[:12] in pinpool.torch._library._name, "another version of pinpool compiles its own"
    """
    environment = {**os.environ, "PATH": "/usr/bin:/bin", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    _, err = run_python("-c", textwrap.dedent(code), env=environment)
    import torch

    assert err.count("torch no_gpu: ") == (0 if torch.cuda.is_available() else 2), "once for each install"


def test_the_allocator_of_a_wheel_needs_no_compiler_and_no_new_glibc_and_is_replaced_if_incompatible(tmp_path):
    import torch

    minor, include = ".".join(torch.__version__.split(".")[:2]), Path(torch.__file__).parent / "include"
    subprocess.run([sys.executable, SCRIPTS / "build_allocators.py", "--only", minor, "--include", include, "--out", tmp_path], check=True)
    prebuilt = tmp_path / f"torch_{minor.replace('.', '_')}.so"
    code = f"""
        import os, pathlib
        if "WITHOUT_COMPILER" in os.environ:
            os.environ.update(CXX="/none", PATH="")
        pinpool.torch._allocator._PREBUILT = pathlib.Path({str(tmp_path)!r})
        pool = pinpool.torch.install(max_bytes="64MiB", backend="heap")
        block = probe.allocate(3 * MIB)
        assert pool.stats()["memory"]["in_use"] == 1
        block.free()
        print(pinpool.torch._library._name)
    """
    assert run(code, WITHOUT_COMPILER="1").splitlines()[-1] == str(prebuilt)
    if shutil.which("objdump") is not None:
        symbols = subprocess.run(["objdump", "-T", prebuilt], check=True, capture_output=True, text=True).stdout
        versions = {tuple(map(int, version.split("."))) for version in re.findall(r"GLIBC_([0-9.]+)", symbols)}
        assert max(versions) <= (2, 28) and "libtorch_cuda" not in symbols
    prebuilt.write_bytes(b"no library")
    assert "pinpool_torch_" in run(code).splitlines()[-1]
