"""DistributedDataParallel under torchrun: the workers of each rank fill pinned memory, and all ranks of the host share one limit.
If a rank dies, torchrun restarts all ranks, and they continue after the step of the last checkpoint.

    pip install './python[torch]'
    PINPOOL_LEDGER=NAME PINPOOL_MAX_BYTES=256MiB torchrun --standalone --nproc-per-node 4 --max-restarts 3 python/examples/torchrun.py DIRECTORY --out RUN
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import pinpool.torch

BATCH = 8


class Files:
    """The files of a directory: bytes of equal length, and the number of the file."""

    def __init__(self, directory: Path) -> None:
        self.paths = sorted(path for path in directory.iterdir() if path.is_file())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.fromfile(self.paths[index], np.uint8), index


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("directory", type=Path, help="files of equal length, up to 128 KiB (a batch of 8 fits into a buffer)")
    parser.add_argument("--out", type=Path, required=True, help="where the checkpoint with the list of samples is written")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--die", type=int, metavar="RANK", help="this rank kills itself after its third step, once")
    args = parser.parse_args()

    if "RANK" not in os.environ:
        print("RANK is not set: start this with torchrun", file=sys.stderr)
        return 2
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, gpus = torch.device("cpu"), torch.cuda.device_count()
    if gpus:
        # A launcher may make only one GPU visible to each rank.
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
        torch.cuda.set_device(device)  # Before a pool chooses its GPU.
    # torchrun's store outlives a restart, so each attempt has its own keys.
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    backend = "cpu:gloo,cuda:nccl" if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo"
    torch.distributed.init_process_group(backend, store=PrefixStore(attempt, store), rank=rank, world_size=world)

    dataset: Any = Files(args.directory)
    sampler: Any = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=True)
    model = DistributedDataParallel(torch.nn.Linear(len(dataset[0][0]), 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    # One checkpoint for all ranks, so that they continue at the same step.
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint = args.out / "checkpoint.pt"
    saved: dict[str, Any] = {"epoch": 0, "step": 0, "trained": []}
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])

    shared = pinpool.SharedPool(buffer_bytes="1.25MiB", num_buffers=4, pool=pinpool.Pool(name=f"rank{rank}"))
    steps = 0
    for epoch in range(saved["epoch"], args.epochs):
        sampler.set_epoch(epoch)
        left = list(sampler)[saved["step"] * BATCH :]  # Without the samples of the steps before the restart.
        loader = DataLoader(dataset, BATCH, sampler=left, num_workers=1, collate_fn=shared.collate)
        for files, numbers in pinpool.torch.prefetch(shared.batches(loader), device):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(files / 255).squeeze(1), files.float().mean(1))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            trained: list[Any] = [None] * world
            torch.distributed.all_gather_object(trained, [[epoch, number] for number in numbers.tolist()])
            saved["trained"] += [sample for of_rank in trained for sample in of_rank]
            saved |= {"epoch": epoch, "step": saved["step"] + 1, "model": model.state_dict()}
            if rank == 0:
                # Written atomically. A real program saves less often, and also the state of its optimizer.
                partial = checkpoint.with_suffix(".new")
                torch.save(saved, partial)
                partial.replace(checkpoint)
            torch.distributed.barrier()
            steps += 1
            if rank == args.die and steps == 3 and attempt == "0":
                os.kill(os.getpid(), signal.SIGKILL)
        saved["step"] = 0
    print(f"rank {rank} of {world}: {len(saved['trained'])} samples of all ranks, {steps} steps in this process")
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
