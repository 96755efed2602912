"""A training loop under torchrun: each rank loads its part of the samples through a pool of its own, all ranks of the host
under one ceiling. A rank that dies makes torchrun start all of them anew; each goes on behind its last step.

    pip install ./python torch
    torchrun --standalone --nproc-per-node 4 --max-restarts 3 python/examples/torchrun.py FILES_OR_DIRECTORY --out RUN
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path

# One ceiling for all ranks of the host.
os.environ.setdefault("PINPOOL_LEDGER", "auto")
os.environ.setdefault("PINPOOL_MAX_BYTES", "256MiB")

import pinpool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("paths", nargs="+", help="files, directories or .tar shards")
    parser.add_argument("--out", type=Path, required=True, help="where checkpoints and the list of samples are written")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--die", type=int, metavar="RANK", help="this rank kills itself after its third step, once")
    args = parser.parse_args()

    if "RANK" not in os.environ:
        print("RANK is not set: start this with torchrun", file=sys.stderr)
        return 2
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint = args.out / f"rank{rank}.json"

    saved = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"state": None, "trained": []}
    loader = pinpool.Loader(
        args.paths,
        batch_size=8,
        workers=1,
        shuffle=True,
        rank=rank,
        world=world,
        epochs=args.epochs,
        state=saved["state"],
        pool=pinpool.Pool(name=f"rank{rank}"),
        containers=True,
    )
    steps = 0
    for batch in loader:
        # The step of the training: `batch.tensors()` are views of pinned memory.
        saved["trained"] += [[batch.epoch, key] for key in batch.keys]
        saved["state"] = loader.state()
        # The state goes with the model, in one rename: after a death both are of the same step.
        beside = checkpoint.with_suffix(".new")
        beside.write_text(json.dumps(saved))
        beside.replace(checkpoint)
        steps += 1
        if rank == args.die and steps == 3 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    print(f"rank {rank} of {world}: {len(saved['trained'])} samples, {steps} steps in this process")
    return 0


if __name__ == "__main__":
    sys.exit(main())
