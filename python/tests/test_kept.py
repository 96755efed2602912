"""Memory that a keeper holds, with the tool where it is built."""

import os
import pathlib
import subprocess

import numpy as np
import pytest

import pinpool

from conftest import until

ROOT = pathlib.Path(__file__).parents[2]
TOOLS = [pathlib.Path(os.environ.get("PINPOOL_TOOL", "-")), ROOT / "target" / "debug" / "pinpool"]
TOOL = next((tool for tool in TOOLS if tool.is_file()), None)


def keeps(tool):
    return tool is not None and "keep" in subprocess.run([tool, "--help"], capture_output=True, text=True).stdout


needs_tool = pytest.mark.skipif(not keeps(TOOL), reason="the tool is not built: cargo build --features cli")


def test_a_name_that_nobody_keeps_is_told_with_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(pinpool.PeerError, match="start `pinpool keep none --bytes 4096`"):
        pinpool.kept("none", 4096)
    with pytest.raises(pinpool.SharedError, match="is no name"):
        pinpool.kept("a/b", 4096)


@needs_tool
def test_a_killed_process_leaves_its_bytes_to_the_next(alone, tmp_path):
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    keeper = subprocess.Popen([TOOL, "keep", "w", "--bytes", "1MiB"], env=environment, stderr=subprocess.PIPE)
    try:
        until(lambda: list(tmp_path.glob("*.sock")))
        code = """
        import os, signal, numpy as np, pinpool
        kept = pinpool.kept("w", "1MiB", pool=pinpool.Pool(env=False, backend="heap"))
        print(kept.generation, kept.completed, flush=True)
        """
        write = """
        kept.begin()
        with kept.buffer() as buf: np.frombuffer(buf, np.uint8)[:] = 7
        kept.complete("step 1")
        with kept.buffer(4096, 10) as buf: memoryview(buf)[:] = b"0123456789"
        os.kill(os.getpid(), signal.SIGKILL)
        """
        assert alone(code + write, expect=-9, env=environment)[0] == "0 None\n"
        read = """
        array = np.frombuffer(kept.buffer(), np.uint8)
        print(len(array), bytes(array[4096:4106]), int(array[0]), int(array[-1]))
        try: pinpool.kept("w", "1MiB")
        except pinpool.PeerError as error: print("one holds it" in str(error))
        """
        out, _ = alone(code + read, env=environment)
        assert out == "1 _Mark(label='step 1', nbytes=1048576, generation=0)\n1048576 b'0123456789' 7 7\nTrue\n"
    finally:
        keeper.terminate()
        _, told = keeper.communicate(timeout=300)
    assert keeper.returncode == 0 and b"keeps 1MiB" in told, told
    assert not list(tmp_path.glob("*.sock"))
