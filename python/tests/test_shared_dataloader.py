"""torch's DataLoader with `collate_fn=shared.collate` and `shared.batches`."""

import random

import numpy as np
import pytest

import pinpool
from helpers import heap, until

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, default_collate, get_worker_info  # noqa: E402
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter  # noqa: E402


class Images(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        return torch.full((3, 8), index, dtype=torch.bfloat16), index


class Stream(IterableDataset):
    """The numbers up to 40, each from one worker."""

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return iter(torch.full((8,), number) for number in range(worker, 40, workers))


class Counted(Stream):
    def __len__(self):
        return 40


class Drawn(Images):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return np.array([index, random.getrandbits(50), np.random.randint(1 << 50), int(torch.randint(1 << 50, (1,)))])


@pytest.fixture
def shared(pool):
    with pinpool.SharedPool("64KiB", 9, pool=pool) as shared:
        assert shared.library == "torch"
        yield shared


def free(shared):
    return shared.counts()["free"]


def numbers(batches):
    return [int(number) for batch in batches for number in (batch[1] if isinstance(batch, list) else batch[:, 0])]


def test_a_loader_yields_the_same_batches_as_without_pinpool(shared):
    expected = list(DataLoader(Images(), batch_size=4))
    batches = shared.batches(DataLoader(Images(), batch_size=4, num_workers=2, collate_fn=shared.collate))
    assert len(batches) == len(expected) == 13
    for _epoch in range(2):
        for (images, labels), (its_images, its_labels) in zip(batches, expected, strict=True):
            assert torch.equal(images, its_images) and torch.equal(labels, its_labels) and images.dtype == torch.bfloat16
        del images, labels
        until(lambda: free(shared) == 9)


def test_a_collate_function_may_pack_its_batch(shared):
    loader = DataLoader(Images(), batch_size=4, num_workers=2, collate_fn=lambda samples: shared.pack(default_collate(samples)))
    assert numbers(shared.batches(loader)) == numbers(DataLoader(Images(), batch_size=4)) and free(shared) == 9


@pytest.mark.parametrize("workers", [0, 2])
def test_samplers_and_iterable_datasets_give_each_sample_once(shared, workers):
    arguments = dict(batch_size=4, num_workers=workers, collate_fn=shared.collate)
    sampler = DistributedSampler(Images(), num_replicas=2, rank=1, shuffle=True)
    batches = shared.batches(DataLoader(Images(), sampler=sampler, **arguments))
    batches.sampler.set_epoch(3)
    with pytest.raises(AttributeError, match="set 'sampler' of the DataLoader"):
        batches.sampler = None
    assert sampler.epoch == 3 and batches.batch_sampler.sampler is sampler and numbers(batches) == list(sampler)
    for dataset in (Stream(), Counted()):
        assert sorted(numbers(shared.batches(DataLoader(dataset, **arguments)))) == list(range(40))
    with pytest.raises(TypeError, match="Stream.*no len|has no length"):
        len(shared.batches(DataLoader(Stream(), **arguments)))
    assert free(shared) == 9


def test_persistent_workers_free_buffers_after_a_break(shared):
    loader = DataLoader(Images(), batch_size=4, num_workers=2, persistent_workers=True, collate_fn=shared.collate)
    workers = set()
    for _epoch in range(12):
        for number, batch in enumerate(shared.batches(loader)):
            if number == 2:
                break
        workers |= {worker.pid for worker in loader._iterator._workers}
    del batch
    assert len(workers) == 2, "the workers are the same in each epoch"
    assert numbers(shared.batches(loader)) == list(range(50))
    until(lambda: free(shared) == 9)


def test_persistent_workers_are_not_asked_while_batches_are_kept():
    shared = pinpool.SharedPool("64KiB", num_buffers=4, pool=heap())
    loader = DataLoader(Images(), batch_size=4, num_workers=1, persistent_workers=True, collate_fn=shared.collate)
    kept = []
    for batch in shared.batches(loader):
        kept.append(batch)
        if len(kept) == 3:
            break
    with pytest.raises(pinpool.LimitError, match="3 of 4 shared buffers belong"):
        next(iter(shared.batches(loader)))
    kept.clear()
    del batch
    assert numbers(shared.batches(loader)) == list(range(50))


def test_a_loader_without_batches_keeps_no_buffer(shared):
    loader = DataLoader(Images(), batch_size=4, num_workers=2, collate_fn=shared.collate)
    for packed in loader:
        assert "shared.batches(loader)" in repr(packed)
        break
    del packed
    # Workers that have ended may leave unread tickets in torch's queue.
    assert numbers(shared.batches(loader)) == list(range(50))
    assert free(shared) == 9


def test_an_error_for_too_few_buffers_names_the_number_that_suffices():
    shared = pinpool.SharedPool("64KiB", num_buffers=4, pool=heap())
    with pytest.raises(pinpool.LimitError, match="set num_buffers=6"):
        numbers(shared.batches(DataLoader(Images(), batch_size=4, num_workers=2, collate_fn=shared.collate)))


@pytest.mark.parametrize(("workers", "kept"), [(0, 9), (1, 8), (2, 6)])
def test_keeping_too_many_batches_fails_immediately_but_not_at_the_end(shared, workers, kept):
    def loader(samples):
        dataset = torch.utils.data.Subset(Images(), range(samples))
        return DataLoader(dataset, batch_size=4, num_workers=workers, collate_fn=shared.collate)

    batches = []
    with pytest.raises(pinpool.LimitError, match=f"{kept} of 9 shared buffers belong.*set num_buffers="):
        for batch in shared.batches(loader(50)):
            batches.append(batch)
    assert len(batches) == kept
    del batches, batch
    batches = list(shared.batches(loader(36)))
    assert numbers(batches) == list(range(36)) and shared.counts()["received"] == 9
    del batches
    assert numbers(shared.batches(loader(50))) == list(range(50))


def test_the_error_for_keeping_too_many_batches_does_not_wait_for_workers(shared, monkeypatch):
    """torch joins each worker for up to 5 s and then kills it, so workers that wait for a buffer must fail earlier."""
    statuses = []
    shutdown = _MultiProcessingDataLoaderIter._shutdown_workers

    def observed(iterator):
        shutdown(iterator)
        statuses.extend(worker.exitcode for worker in iterator._workers)

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_shutdown_workers", observed)
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 300.0)  # The time for which torch joins a worker.
    batches = []
    with pytest.raises(pinpool.LimitError, match="shared buffers belong"):
        for batch in shared.batches(DataLoader(Images(), batch_size=2, num_workers=2, prefetch_factor=2, collate_fn=shared.collate)):
            batches.append(batch)
    assert set(statuses) == {0}, "torch killed no worker"
    del batches, batch
    assert numbers(shared.batches(DataLoader(Images(), batch_size=4, num_workers=2, collate_fn=shared.collate))) == list(range(50))


@pytest.mark.parametrize(("module", "is_warned"), [("torch.utils.data.dataloader", True), (__name__, False)])
def test_a_torch_without_the_private_names_of_its_workers_is_reported(shared, caplog, module, is_warned):
    iterator = type("Iterator", (), {"__module__": module, "__next__": lambda self: next(iter(())), "_workers": (), "_persistent_workers": False})()
    loader = type("Loader", (), {"num_workers": 2, "__iter__": lambda self: iterator})()
    assert list(shared.batches(loader)) == []
    assert any("torch workers: this torch has no _shutdown_workers, so" in text for text in caplog.messages) == is_warned


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_seeds_are_those_of_torch(shared, method):
    def drawn():
        # The seeds of an epoch's workers come from this generator.
        generator = torch.Generator().manual_seed(5)
        loader = DataLoader(Drawn(), batch_size=1, num_workers=2, generator=generator, multiprocessing_context=method, collate_fn=shared.collate)
        return [batch[0].tolist() for _epoch in range(2) for batch in shared.batches(loader)]

    rows = drawn()
    assert drawn() == rows
    for column in list(zip(*rows, strict=True))[1:]:
        assert len(set(column)) == 2 * 8
