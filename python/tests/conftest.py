import gc
import subprocess
import sys
import textwrap
import time

import pytest

import pinpool


@pytest.fixture
def pool():
    """A pool on ordinary memory that takes no setting from outside. The wait bounds a hang: under load a pin call may take long."""
    return pinpool.Pool(env=False, backend="heap", max_bytes="64MiB", wait="300s")


@pytest.fixture
def alone():
    """Runs code in a process of its own, at most for 60 s; returns what it printed, and fails if it fails."""

    def run(code, expect=0, env=None):
        code = textwrap.dedent(code)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env)
        assert done.returncode == expect, f"exit status {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout, done.stderr

    return run


def until(condition, seconds=300):
    """Waits until `condition()` is true. Bounds a hang alone: a machine with other work makes a test late and not fail."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.001)


def in_use(pool):
    gc.collect()
    return pool.stats()["memory"]["in_use"]
