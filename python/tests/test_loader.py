"""`Loader`: order, ranks, states, memory and failures."""

import gc
import hashlib
import inspect
import itertools
import json
import os
import pickle
import sys
import threading
import types
import warnings

import numpy as np
import pytest

import pinpool
import pinpool_loader
from helpers import heap, in_use, until, write_tar


@pytest.fixture
def files(tmp_path):
    """A directory of 20 files in two directories; file `i` has `i * 37` bytes of value `i`."""
    for number in range(20):
        folder = tmp_path / f"class{number % 2}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number:02}.bin").write_bytes(bytes([number]) * (number * 37))
    return tmp_path


def write_samples(folder, count):
    for number in range(count):
        (folder / f"{number:03}").write_bytes(b"x")


def path_of(files, number):
    return files / f"class{number % 2}" / f"{number:02}.bin"


def load(files, pool, **settings):
    return pinpool_loader.Loader(files, pool=pool, **{"batch_size": 3, "num_threads": 2, **settings})


def contents(batches):
    return [(batch.epoch, batch.index_in_epoch, batch.names, [bytes(sample) for sample in batch]) for batch in batches]


def test_batches_have_the_samples_their_names_and_their_labels(files, pool):
    loader = load(files, pool)
    seen = 0
    for number, batch in enumerate(loader):
        assert (batch.index_overall, batch.epoch, batch.index_in_epoch) == (number, 0, number)
        assert len(batch) == len(batch.names) == len(batch.labels) == len(list(batch))
        for at, sample in enumerate(batch):
            order = batch.sample_indices[at]
            assert order == seen
            of_file = seen * 2 if seen < 10 else seen * 2 - 19
            assert sample.dtype == np.uint8 and sample.tobytes() == bytes([of_file]) * (of_file * 37)
            assert batch.names[at] == str(path_of(files, of_file))
            assert batch.labels[at] == of_file % 2
            assert batch.is_whole(at) and batch.sample_offsets[at] == 0
            seen += 1
        assert batch.nbytes == sum(map(len, batch)) == batch.buffer.nbytes
    assert (seen, loader.num_samples, loader.nbytes, len(loader)) == (20, 20, sum(range(20)) * 37, 7)


def test_samples_are_views_of_pinned_memory_without_a_copy(files, pool):
    batch = next(iter(load(files, pool, batch_size=4)))
    sample = batch[2]
    assert sample.ctypes.data == batch.buffer.ptr + batch.buffer_offsets[2]
    sample[:] = 99
    assert batch[2].tolist() == [99] * len(sample) and batch[-2].tolist() == sample.tolist()
    assert [len(view) for view in batch[1:3]] == [len(batch[1]), len(batch[2])]
    with pytest.raises(IndexError, match="sample 4 is out of range: the batch has 4"):
        batch[4]
    assert batch.buffer.num_views > 0
    with pytest.raises(BufferError):
        batch.buffer.release()


def test_memory_returns_when_the_batch_and_its_views_are_gone(files, pool):
    loader = load(files, pool)
    batches = iter(loader)
    batch = next(batches)
    sample = batch[1]
    loader.close()
    assert in_use(pool) == 1
    del batch
    assert in_use(pool) == 1 and sample.tolist() == [2] * 74
    del sample
    assert in_use(pool) == 0


def test_a_loop_holds_one_batch_at_a_time(tmp_path):
    for number in range(10):
        (tmp_path / str(number)).write_bytes(bytes(1000))
    pool = heap()
    for batch in pinpool_loader.Loader(tmp_path, batch_size=1, read_ahead=1, num_threads=1, pool=pool):
        # This batch and one read ahead.
        assert pool.stats()["memory"]["in_use"] <= 2
    del batch
    assert in_use(pool) == 0


def test_batches_carry_the_tag_of_the_pool_object(files, pool):
    batch = next(iter(load(files, pool.tagged("train/images"), read_ahead=1)))
    assert "train/images (" in pool.report() and len(batch) == 3


def test_the_batches_of_an_epoch_are_counted_once(files, pool):
    loader = load(files, pool, epochs_per_loop=2, shuffle=True)
    listed, counted = loader._catalog, []
    loader._catalog = types.SimpleNamespace(num_batches=lambda epoch: counted.append(epoch) or listed.num_batches(epoch))
    assert [len(loader) for _ in range(3)] == [14] * 3 and counted == [0, 1]


def test_samples_are_hashed_once_however_often_the_state_is_taken(files, pool):
    loader = load(files, pool)
    listed, hashed = loader._catalog, []
    loader._catalog = types.SimpleNamespace(fingerprint=lambda: hashed.append(1) or listed.fingerprint())
    assert len({loader.state_dict()["files"] for _ in range(3)}) == 1 and hashed == [1]


def test_each_for_iterates_over_the_next_epochs_in_a_new_order(files, pool):
    loader = load(files, pool, shuffle=True, seed=5, epochs_per_loop=2)
    first, second = contents(loader), contents(loader)
    assert [batch[0] for batch in first] == [0] * 7 + [1] * 7 and [batch[0] for batch in second] == [2] * 7 + [3] * 7
    orders = [[name for epoch, _, names, _ in first + second if epoch == wanted for name in names] for wanted in range(4)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders) and len(set(map(tuple, orders))) == 4
    assert contents(load(files, pool, shuffle=True, seed=5, epochs_per_loop=2)) == first
    assert contents(load(files, pool, shuffle=True, seed=6, epochs_per_loop=2)) != first


@pytest.mark.parametrize("taken", [0, 1, 6, 7, 11, 13, 14])
def test_a_state_resumes_with_exactly_the_remaining_batches(files, pool, taken):
    settings = {"shuffle": True, "seed": 1, "epochs_per_loop": 2}
    whole = contents(load(files, pool, **settings))
    loader = load(files, pool, **settings)
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    # After the last batch, the state is the start of the next pass.
    rest = whole[taken:] or contents(load(files, pool, **{**settings, "epochs_per_loop": 4}))[14:]
    assert contents(load(files, pool, state=state, **settings))[: len(rest)] == rest[:14]
    other = load(files, pool, **settings)
    next(iter(other))
    other.load_state_dict(state)
    assert contents(other)[: len(rest)] == rest[:14]
    assert contents(batches) == whole[taken:], "taking a state changes nothing"


KEPT = []
#: Ways to take all batches of one pass.
LOOPS = {
    "exhaustion": list,
    "zip": lambda loader: [batch for _, batch in zip(range(len(loader)), loader, strict=False)],
    "islice": lambda loader: list(itertools.islice(loader, len(loader))),
    "next": lambda loader: [next(batches) for batches in [iter(loader)] for _ in range(len(loader))],
    "kept iterator": lambda loader: KEPT.append(iter(loader)) or [next(KEPT[-1]) for _ in range(len(loader))],
}


@pytest.mark.parametrize("num_map_threads", [None, 2])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("epochs", [1, 2])
def test_every_for_is_a_whole_pass_however_the_loop_ends(files, pool, loop, epochs, num_map_threads):
    mapped = {"map": lambda batch: batch, "num_map_threads": num_map_threads} if num_map_threads else {}
    loader = load(files, pool, epochs_per_loop=epochs, shuffle=True, **mapped)
    for time in range(3):
        batches = loop(loader)
        assert [(batch.epoch, batch.index_in_epoch) for batch in batches] == [
            (time * epochs + epoch, at) for epoch in range(epochs) for at in range(7)
        ]
        assert all(
            len({name for batch in batches if batch.epoch == epoch for name in batch.names}) == 20
            for epoch in range(time * epochs, (time + 1) * epochs)
        )
        state = loader.state_dict()
        assert (state["epoch"], state["index_in_epoch"], state["index_overall"]) == ((time + 1) * epochs, 0, (time + 1) * epochs * 7)
    KEPT.clear()


def test_after_break_the_next_for_starts_an_epoch(files, pool):
    loader = load(files, pool)
    for batch in loader:
        if batch.index_in_epoch == 2:
            break
    state = loader.state_dict()
    for epoch in (1, 2):
        assert [(batch.epoch, batch.index_in_epoch) for batch in loader] == [(epoch, index) for index in range(7)]
    loader.load_state_dict(state)
    assert [(batch.epoch, batch.index_in_epoch) for batch in loader] == [(0, index) for index in range(3, 7)]
    assert [(batch.epoch, batch.index_in_epoch) for batch in loader] == [(1, index) for index in range(7)], "once"
    next(iter(loader))
    loader.close()
    assert len(list(loader)) == len(loader) == 7


#: Programs in which a second loop begins before the first has ended: the first must not end early without an error.
SECOND_LOOPS = {
    "zip": lambda loader: list(zip(loader, loader, strict=False)),
    "nested": lambda loader: [second for _ in loader for second in loader],
    "nested break": lambda loader: [next(iter(loader)) for _ in loader],
    "thread": lambda loader: threads_that_loop(loader),
}


def threads_that_loop(loader):
    """A thread reads ahead of the program, as a DataLoader's `pin_memory` thread does, while another loop begins."""
    began, failures = threading.Event(), []

    def read():
        try:
            for _ in loader:
                began.set()
                until(lambda: second)
        except RuntimeError as error:
            failures.append(error)

    second = []
    thread = threading.Thread(target=read)
    thread.start()
    until(began.is_set)
    batches = iter(loader)
    second.append(next(batches))
    thread.join(300)
    assert [batch.index_in_epoch for batch in second + list(batches)] == list(range(7)), "the second loop is complete"
    raise failures.pop()


@pytest.mark.parametrize("settings", [{}, {"map": lambda batch: batch}], ids=["batches", "map"])
@pytest.mark.parametrize("program", SECOND_LOOPS.values(), ids=SECOND_LOOPS)
def test_the_first_of_two_loops_at_a_time_is_an_error(files, pool, program, settings):
    loader = load(files, pool, **settings)
    with pytest.raises(RuntimeError, match="another loop over this Loader has begun: create one Loader for each loop"):
        program(loader)
    assert [batch.index_in_epoch for batch in loader] == list(range(7)), "a loop after the error is complete"
    first = iter(loader)
    next(first)
    loader.close()
    later = iter(loader)
    next(later)
    assert list(first) == [], "`close` ends a loop without an error, also if another loop begins"
    assert len([next(later) for _ in range(6)]) == 6 and len(list(loader)) == 7
    assert list(later) == [], "a loop that has delivered all batches is not an error either"


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("settings", [{"even": True}, {"drop_last": True}, {"even": True, "drop_last": True}], ids=str)
@pytest.mark.parametrize("samples", [99, 100, 101, 102])
def test_ranks_have_the_same_number_of_batches(tmp_path, pool, world, settings, samples, recwarn):
    write_samples(tmp_path, samples)
    seen = []
    for rank in range(world):
        loader = pinpool_loader.Loader(tmp_path, batch_size=10, rank=rank, world_size=world, shuffle=True, pool=pool, **settings)
        seen.append([batch.names for batch in loader])
        assert len(loader) == len(seen[-1])
    assert len({tuple(map(len, batches)) for batches in seen}) == 1 and not recwarn.list
    names = [name for batches in seen for batch in batches for name in batch]
    expected = samples // (10 * world) * 10 * world if settings == {"drop_last": True} else None
    if settings == {"even": True}:
        expected = -(-samples // world) * world
        assert len(set(names)) == samples, "no sample is left out"
    assert expected in (None, len(names))
    assert "drop_last" not in settings or all(len(batch) == 10 for batches in seen for batch in batches)


def test_different_numbers_of_batches_per_rank_are_a_warning(tmp_path, pool):
    write_samples(tmp_path, 101)
    for settings in ({"batch_size": 50}, {"batch_bytes": 50}):
        with pytest.warns(UserWarning, match="the ranks get (2 and 1|different numbers of) batches .*even=True.* or drop_last=True"):
            pinpool_loader.Loader(tmp_path, rank=0, world_size=2, pool=pool, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pinpool_loader.Loader(tmp_path, rank=0, world_size=2, batch_size=51, pool=pool)
    with pytest.raises(ValueError, match="rank=0 has no batch of 101 samples of world_size=2, batch_size=60, drop_last=True"):
        pinpool_loader.Loader(tmp_path, rank=0, world_size=2, batch_size=60, drop_last=True, pool=pool)


def test_the_threads_within_the_cpu_quota_are_divided_among_the_ranks(monkeypatch):
    assert 1 <= pinpool._pinpool._default_threads() <= len(os.sched_getaffinity(0))
    monkeypatch.setattr(pinpool._pinpool, "_default_threads", lambda: 16)
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    for cores, ranks, threads in ((96, "8", 2), (96, "64", 1), (96, "1", 0), (96, "several", 0), (96, "", 0), (12, "8", 0)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, cores=cores: set(range(cores)))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert pinpool_loader._loader._default_num_threads() == threads, (cores, ranks)


def test_random_numbers_of_a_batch_are_the_same_in_each_run(files, pool):
    def drawn(**settings):
        return list(load(files, pool, epochs_per_loop=2, map=lambda batch: batch.rng().random(), **settings))

    first = drawn(seed=1, num_map_threads=1)
    assert len(set(first)) == 14 and drawn(seed=1, num_map_threads=4, num_threads=1) == first
    assert not set(first) & set(drawn(seed=2)) and first[0] == np.random.default_rng((1, 0, 0)).random()
    [batch] = load(files, pool, batch_size=20, seed=5)
    assert pickle.loads(pickle.dumps(batch)).rng().random() == batch.rng().random() != batch.rng().random()
    with pinpool_loader.Loader(files, batch_size=3, world_size=2, rank=1, even=True, seed=1, pool=pool) as other:
        assert next(iter(other)).rng().random() not in first, "each rank has different random numbers"


def test_directories_are_classes(files, pool):
    loader = load(files, pool)
    assert loader.classes == ["class0", "class1"]
    for batch in loader:
        assert [loader.classes[label] for label in batch.labels] == [name.split("/")[-2] for name in batch.names]
    assert {label for batch in load(files, pool, label_function=str) for label in batch.labels} == {"class0", "class1"}
    assert {label for batch in load(files, pool, label_function={"class0": 7, "class1": 9}.get) for label in batch.labels} == {7, 9}
    with pytest.raises(ValueError, match="label_function: the directory name 'class0' is not a label: invalid literal"):
        load(files, pool, label_function=int)


@pytest.mark.parametrize("settings", [{"batch_size": 4}, {"shuffle": True}, {"rank": 1, "world_size": 2}, {"batch_bytes": 500}], ids=str)
def test_a_state_of_a_different_loader_is_refused(files, pool, settings):
    state = load(files, pool).state_dict()
    said = {
        "batch_size": "batch_size=3 in the state, 4 here",
        "shuffle": "shuffle=False in the state, True here",
        "rank": "world_size=1 in the state, 2 here",
        "batch_bytes": "batch_bytes=0 in the state, 500 here",
    }
    with pytest.raises(ValueError, match=f"a loader with different batches: .*{said[next(iter(settings))]}"):
        load(files, pool, state=state, **{**settings, "even": "world_size" in settings})
    for wrong in (3, "epoch 3", {"epoch": 0}):
        with pytest.raises(TypeError, match="state must be a result of Loader.state_dict.., not"):
            load(files, pool, state=wrong)
    with pytest.raises(ValueError, match="state is at batch 9 of epoch 0, which has 7"):
        load(files, pool, state={**state, "index_in_epoch": 9})
    with pytest.raises(TypeError, match="index_in_epoch"):
        load(files, pool, state={**state, "index_in_epoch": "2"})
    path_of(files, 3).write_bytes(b"")
    with pytest.raises(ValueError, match="files='[0-9a-f]{16}' in the state, '[0-9a-f]{16}' here"):
        load(files, pool, state=state)


def test_a_state_fits_files_that_moved_together_and_not_a_renamed_directory(tmp_path, pool):
    for name in ("a/0.bin", "a/1.bin", "b/0.bin", "b/1.bin"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(name.encode())
    moved = tmp_path / "moved"
    state = pinpool_loader.Loader(tmp_path / "data", batch_size=1, pool=pool).state_dict()
    (tmp_path / "data").rename(moved)
    pinpool_loader.Loader(moved, batch_size=1, pool=pool, state=state)
    (moved / "a").rename(moved / "c")
    with pytest.raises(ValueError, match="a loader with different batches"):
        pinpool_loader.Loader(moved, batch_size=1, pool=pool, state=state)


def test_ranks_with_equal_batches_share_their_states(files, pool):
    first = load(files, pool, world_size=3, rank=0, even=True)
    next(iter(first))
    assert [batch.index_in_epoch for batch in load(files, pool, world_size=3, rank=2, even=True, state=first.state_dict())] == [1, 2]
    with pytest.warns(UserWarning):
        uneven = load(files, pool, world_size=3, rank=1).state_dict()
        with pytest.raises(ValueError, match="rank=1 in the state, 2 here"):
            load(files, pool, world_size=3, rank=2, state=uneven)


def test_batches_by_bytes_have_long_samples_in_parts(tmp_path, pool):
    (tmp_path / "a").write_bytes(bytes(range(250)))
    (tmp_path / "b").write_bytes(b"xyz")
    batches = list(pinpool_loader.Loader(tmp_path, batch_bytes="100", pool=pool))
    assert [(batch.sample_offsets, batch.buffer_offsets, [batch.is_whole(at) for at in range(len(batch))]) for batch in batches] == [
        ([0], [0], [False]),
        ([100], [0], [False]),
        ([200, 0], [0, 50], [False, True]),
    ]
    assert b"".join(batch[0].tobytes() for batch in batches) == bytes(range(250))


def test_empty_files_are_samples(tmp_path, pool):
    for name in "ab":
        (tmp_path / name).touch()
    [batch] = pinpool_loader.Loader(tmp_path, pool=pool)
    assert [sample.shape for sample in batch] == [(0,), (0,)] and batch.nbytes == 0


def test_tensors_are_views(files, pool):
    torch = pytest.importorskip("torch")
    batch = next(iter(load(files, pool, batch_size=5)))
    tensors = batch.tensors()
    assert [tensor.tolist() for tensor in tensors] == [sample.tolist() for sample in batch]
    assert tensors[1].data_ptr() == batch.buffer.ptr + batch.buffer_offsets[1] and tensors[1].dtype == torch.uint8
    del batch
    gc.collect()
    assert tensors[3].tolist() == [6] * 222


@pytest.mark.parametrize("broken", ["gone", "short", "long", "directory"])
def test_an_unreadable_file_raises_or_is_skipped(files, pool, broken):
    loader, skipping = load(files, pool), load(files, pool, on_error="skip")
    victim = path_of(files, 8)  # the fifth sample, in batch 1
    said = {"gone": "No such file", "short": "truncated: 5 of the 296", "long": "grew: 296 bytes", "directory": "Is a directory"}
    if broken in ("gone", "directory"):
        victim.unlink()
        if broken == "directory":
            victim.mkdir()
    else:
        victim.write_bytes(bytes({"short": 5, "long": 400}[broken]))
    batches = iter(loader)
    next(batches)
    with pytest.raises(pinpool.LoadError, match=f"08.bin: {said[broken]}.*on_error='skip'") as caught:
        next(batches)
    assert isinstance(caught.value, OSError)
    assert in_use(pool) == 0, "buffers that were read ahead are returned"
    with pytest.raises(pinpool.LoadError):
        list(loader)

    seen = list(skipping)
    assert len(seen) == 7 and len(seen[1]) == 2 and sum(map(len, seen)) == 19
    assert len(seen[1].failures) == len(skipping.failures) == 1 and "08.bin" in skipping.failures[0]
    list(skipping)
    assert len(skipping.failures) == 1, "reported once, however many epochs"


def test_missing_and_empty_paths_are_named(tmp_path, pool):
    with pytest.raises(pinpool.LoadError, match="missing: No such file"):
        pinpool_loader.Loader([tmp_path / "missing"], pool=pool)
    with pytest.raises(ValueError, match="no regular file"):
        pinpool_loader.Loader(tmp_path, pool=pool)
    with pytest.raises(ValueError, match="no regular file"):
        pinpool_loader.Loader([], pool=pool)
    (tmp_path / "bad.tar").write_bytes(bytes(range(256)) * 4)
    with pytest.raises(pinpool.LoadError, match="bad.tar: broken tar"):
        pinpool_loader.Loader(tmp_path / "bad.tar", pool=pool)


def test_a_pool_that_is_too_small_says_so(tmp_path):
    for number in range(4):
        (tmp_path / str(number)).write_bytes(bytes(3_000_000))
    short, long = (heap(max_bytes="4MiB", wait=wait) for wait in ("100ms", "300s"))
    short.get(3_000_000, timeout=300).release()  # Later requests need no pin call, which may take longer than the wait.
    for pool, error in ((short, pinpool.TimeoutError), (heap(max_bytes="4MiB", wait=0), pinpool.LimitError)):
        held = []
        with pytest.raises(pinpool.LimitError, match="PINPOOL_MAX_BYTES.*held") as refused:
            held.extend(pinpool_loader.Loader(tmp_path, batch_size=1, pool=pool))
        assert refused.type is error and "usage on host" in refused.value.report()
    loader = pinpool_loader.Loader(tmp_path, batch_size=1, pool=short)
    short.close()
    with pytest.raises(pinpool.ClosedError, match="closed"):
        next(iter(loader))
    loader = pinpool_loader.Loader(tmp_path, batch_size=1, pool=long)
    batches = iter(loader)
    for number in range(4):
        batch = next(batches)
        assert batch.index_in_epoch == number
        del batch


def test_the_interpreter_lock_is_released_while_a_loop_waits(tmp_path):
    for number in range(2):
        (tmp_path / str(number)).write_bytes(bytes(3_000_000))
    pool = heap(max_bytes="4MiB", wait=300)
    loader = pinpool_loader.Loader(tmp_path, batch_size=1, pool=pool)
    batches = iter(loader)
    held, taken = [next(batches)], []
    waits = threading.Thread(target=lambda: taken.append(next(batches)))
    waits.start()
    until(lambda: pool.stats()["requests"]["waiting"] == 1)
    held.clear()
    waits.join(300)
    assert not waits.is_alive() and taken[0].index_in_epoch == 1


def test_a_loader_of_the_parent_is_refused_in_a_child(files, run_in_subprocess):
    out, _ = run_in_subprocess(f"""
        import os, warnings
        import pinpool
        import pinpool_loader
        warnings.simplefilter("ignore")
        pool = pinpool.Pool(env=False, backend="heap", max_bytes="64MiB")
        loader = pinpool_loader.Loader({str(files)!r}, batch_size=1, pool=pool)
        batches = iter(loader)
        next(batches)
        child = os.fork()
        if child == 0:
            for use in (lambda: next(batches), lambda: list(loader)):
                try:
                    use()
                except pinpool.ForkError as error:
                    print("refused", "after the fork" in str(error), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(sum(1 for _ in batches))
        """)
    assert out.split() == ["refused", "True"] * 2 + ["19"]


def test_one_of_several_ranks_needs_a_world_size(files, pool, monkeypatch):
    for ranks, settings in [("8", {"world_size": 1}), ("8", {"rank": 2, "world_size": 4, "even": True}), ("1", {}), ("many", {})]:
        monkeypatch.setenv("WORLD_SIZE", ranks)
        with warnings.catch_warnings(action="error"):
            assert load(files, pool, **settings).num_samples == 20
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(TypeError, match="world_size= is missing although WORLD_SIZE or torch.distributed shows 8 ranks: pass rank="):
        load(files, pool)
    monkeypatch.delenv("WORLD_SIZE")
    distributed = types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 4)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    with pytest.raises(TypeError, match="shows 4 ranks: pass rank="):
        load(files, pool)
    distributed.is_initialized = lambda: False
    assert load(files, pool).num_samples == 20


def test_a_loader_creates_its_own_pool(files):
    loader = pinpool_loader.Loader(files, batch_size=20)
    assert loader.pool.name == "loader"
    [batch] = loader
    assert len(batch) == 20


def test_each_public_name_has_a_docstring():
    for kind in (pinpool_loader.Loader, pinpool_loader.Batch):
        fields = inspect.get_annotations(kind)
        names = [name for name in vars(kind) if not name.startswith("_") and name not in fields]
        assert names and all(inspect.getdoc(getattr(kind, name)) for name in names)


@pytest.mark.parametrize("kind", ["files", "tar"])
def test_every_sample_arrives_once_by_digest_on_two_ranks_and_after_a_resume(tmp_path, pool, kind):
    rng = np.random.default_rng(4)
    members = [(f"{number}.bin", rng.bytes(int(rng.integers(1, 30_000)))) for number in range(60)]
    expected = {hashlib.sha256(data).hexdigest() for _, data in members}
    path = tmp_path / "data"
    if kind == "tar":
        path = write_tar(tmp_path / "data.tar", members)
    else:
        path.mkdir()
        for name, data in members:
            (path / name).write_bytes(data)

    def ranked(rank, **settings):
        return pinpool_loader.Loader(
            path, batch_size=7, shuffle=True, seed=9, rank=rank, world_size=2, even=True, epochs_per_loop=2, pool=pool, **settings
        )

    def digests(batches):
        return [(batch.epoch, hashlib.sha256(sample).hexdigest()) for batch in batches for sample in batch]

    ranks = [digests(ranked(rank)) for rank in range(2)]
    for epoch in range(2):
        seen = [digest for digests_of in ranks for at, digest in digests_of if at == epoch]
        assert len(seen) == 60 and set(seen) == expected
    for taken in (0, 1, 4, 5, 7, 9):
        loader = ranked(1)
        first = digests(itertools.islice(loader, taken))
        assert first + digests(ranked(1, state=loader.state_dict())) == ranks[1]
