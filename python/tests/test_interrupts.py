"""Ctrl-C ends every call that waits for memory or batches, and the process can exit afterwards."""

import textwrap

import pytest

from helpers import run_python

SETUP = """
    import asyncio, os, signal, tempfile, threading, time
    import numpy as np
    import pinpool, pinpool_loader

    signal.signal(signal.SIGINT, signal.default_int_handler)  # Shells make background jobs ignore it.
    pool = pinpool.Pool(env=False, backend="heap", max_bytes="8MiB", wait=3600)
    blocked = threading.Event()

    def folder(count, nbytes):
        path = tempfile.mkdtemp()
        for number in range(count):
            with open(f"{path}/{number}.bin", "wb") as file:
                file.write(bytes(nbytes))
        return path

    def interrupt():
        blocked.wait()
        time.sleep(0.3)  # Usually the main thread blocks by then; the test passes in any case.
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
"""

PLACES = {
    "get": """
        held = pool.get("7MiB")
        blocked.set()
        pool.get("6MiB")
    """,
    "aget": """
        held = pool.get("7MiB")
        blocked.set()
        asyncio.run(pool.aget("6MiB"))
    """,
    "shared_get": """
        shared = pinpool.SharedPool(1000, 1, pool=pool, library="numpy")
        held = shared.get()
        blocked.set()
        shared.get()
    """,
    "shared_next": """
        shared = pinpool.SharedPool(1000, 1, pool=pool, library="numpy")
        blocked.set()
        shared.receive_next()
    """,
    "loader_without_memory": """
        held = []
        for batch in pinpool_loader.Loader(folder(8, 3 << 20), batch_size=1, pool=pool):
            held.append(batch)
            blocked.set()
    """,
    "loader_with_a_slow_map": """
        def slow(batch):
            blocked.set()
            time.sleep(1)
            return 1

        for _ in pinpool_loader.Loader(folder(500, 1000), batch_size=1, pool=pool, map=slow, num_map_threads=2):
            pass
    """,
    "loop_over_a_loader": """
        for batch in pinpool_loader.Loader(folder(500, 1000), batch_size=1, pool=pool):
            blocked.set()
            time.sleep(3600)
    """,
    "shared_batches": """
        from torch.utils.data import DataLoader

        class Slow:
            def __len__(self):
                return 1000

            def __getitem__(self, index):
                time.sleep(0.5)
                return np.zeros(1000, np.uint8)

        shared = pinpool.SharedPool(4000, 8, pool=pool, library="numpy")
        for _ in shared.batches(DataLoader(Slow(), batch_size=4, num_workers=2, collate_fn=shared.collate)):
            blocked.set()
    """,
}


@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_ends_a_call_that_blocks(place):
    if "torch" in PLACES[place]:
        pytest.importorskip("torch")
    body = textwrap.indent(textwrap.dedent(PLACES[place]), "    ")
    code = textwrap.dedent(SETUP) + f"try:\n{body}\nexcept KeyboardInterrupt:\n    print('interrupted')\n"
    code += "assert pool.stats()['requests']['waiting'] == 0\n"
    out, err = run_python("-c", code)
    assert out == "interrupted\n", err
