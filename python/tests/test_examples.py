"""The examples, on a local Ray cluster and under torchrun, each with one process killed."""

import collections
import pathlib

import pytest

from helpers import run_python

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def test_ray_data_delivers_each_sample_once_though_a_worker_is_killed():
    pytest.importorskip("ray", reason="ray is not installed: pip install 'ray[data]'")
    out, _ = run_python(EXAMPLES / "ray_data.py", "--kill")
    assert "4000 samples of 40 shards from 5 worker processes, one of them killed" in out
    assert "each sample came exactly once, with the bytes that were written" in out
    assert "0 buffers in use" in out


def test_ranks_under_torchrun_continue_after_one_died(tmp_path):
    torch = pytest.importorskip("torch")
    samples = tmp_path / "samples"
    samples.mkdir()
    for sample in range(200):
        (samples / f"{sample:03}.bin").write_bytes(bytes([sample % 251]) * (128 << 10))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--max-restarts", "3")
    out, err = run_python(*torchrun, EXAMPLES / "torchrun.py", samples, "--out", tmp_path / "run", "--epochs", "2", "--die", "2")
    assert "large_batch" not in err, "a batch of the longest files fits into a buffer"
    # The first process completed three of the 14 steps.
    for rank in range(4):
        assert f"rank {rank} of 4: 400 samples of all ranks, 11 steps in this process" in out
    saved = torch.load(tmp_path / "run" / "checkpoint.pt")
    trained = collections.Counter(map(tuple, saved["trained"]))
    assert len(trained) == 400 and set(trained.values()) == {1}


def test_torchs_workers_fill_pinned_memory():
    pytest.importorskip("torch")
    out, _ = run_python(EXAMPLES / "workers.py", "--workers", "2")
    assert out.startswith("400 samples") and "{'free': 6, 'filling': 0, 'sent': 0, 'received': 0}" in out
