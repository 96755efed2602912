import textwrap

import pytest

from helpers import heap, run_python


@pytest.fixture
def pool():
    """A pool without a maintenance thread. Its long `wait` only bounds how long a failing test hangs."""
    return heap(wait="300s", maintenance_thread=False)


@pytest.fixture
def run_in_subprocess():
    """Runs code in a separate process and returns its output."""
    return lambda code, **settings: run_python("-c", textwrap.dedent(code), **settings)
