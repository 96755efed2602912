"""Functions that several tests use."""

import gc
import io
import subprocess
import sys
import tarfile
import threading
import time

import pinpool


def heap(**settings):
    """A pool on ordinary memory that reads no environment variables."""
    return pinpool.Pool(**{"env": False, "backend": "heap", "max_bytes": "64MiB", **settings})


def run_python(*command, expect=0, **settings):
    """Runs Python in a separate process and returns its output; fails if the exit status differs from `expect`. 600 s bound a hang."""
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=600, **settings)
    assert done.returncode == expect, f"exit status {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


def run_threads(*functions):
    """Runs each function in a thread and waits until all have ended."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)


def until(condition, seconds=300):
    """Waits until `condition()` is true. The time only bounds a hang, so a busy machine cannot fail a test."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.001)


def in_use(pool):
    gc.collect()
    return pool.stats()["memory"]["in_use"]


def write_tar(path, members):
    """Writes an archive of (name, bytes) pairs and returns its path."""
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path
