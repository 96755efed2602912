import gc
import subprocess
import sys
import textwrap
import time

import pytest

import pinpool


@pytest.fixture
def pool():
    """A pool on ordinary memory that reads no variables. No thread moves its idle buffers, and its wait only bounds a hang."""
    return pinpool.Pool(env=False, backend="heap", max_bytes="64MiB", wait="300s", background_thread=False)


@pytest.fixture
def alone():
    """Runs code in a separate process and returns its output; fails if the exit status differs from `expect`. 300 s bound a hang."""

    def run(code, expect=0, env=None):
        code = textwrap.dedent(code)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env)
        assert done.returncode == expect, f"exit status {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout, done.stderr

    return run


def until(condition, seconds=300):
    """Waits until `condition()` is true. The time only bounds a hang, so a busy machine cannot fail a test."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.001)


def in_use(pool):
    gc.collect()
    return pool.stats()["memory"]["in_use"]
