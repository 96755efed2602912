"""The loader under Lightning, Accelerate, torchdata and gloo: every sample of every epoch."""

import socket

import pytest

import pinpool.torch
import pinpool_loader
from helpers import heap

torch = pytest.importorskip("torch")

SAMPLES = 24


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "samples"
    folder.mkdir()
    for number in range(SAMPLES):
        (folder / f"{number:02}.bin").write_bytes(bytes([number]))
    return folder


def loader(folder, **settings):
    tensor = lambda batch: torch.tensor([int(sample[0]) for sample in batch])  # noqa: E731
    return pinpool_loader.Loader(folder, **{"batch_size": 4, "pool": heap(), "map": tensor, **settings})


def lightning_module(lightning):
    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.trained, self.validated = {}, []

        def training_step(self, batch, _index):
            self.trained.setdefault(self.current_epoch, []).extend(batch.tolist())
            return self.weight.sum()

        def validation_step(self, batch, _index):
            self.validated.append((self.trainer.sanity_checking, self.current_epoch, batch.tolist()))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    return Model()


def trainer_of(lightning, folder, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    return lightning.Trainer(**{"accelerator": "cpu", "default_root_dir": folder / "run", **quiet, **settings})


@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_and_validates_on_every_sample_of_every_epoch(folder, tmp_path):
    lightning = pytest.importorskip("lightning")
    model = lightning_module(lightning)
    trainer_of(lightning, tmp_path, max_epochs=4, enable_checkpointing=True).fit(model, loader(folder, shuffle=True), loader(folder))
    assert {epoch: sorted(samples) for epoch, samples in model.trained.items()} == {epoch: list(range(SAMPLES)) for epoch in range(4)}
    assert len({tuple(samples) for samples in model.trained.values()}) == 4, "each epoch has a different order"
    checks = [samples for is_check, _, samples in model.validated if is_check]
    assert checks == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for epoch in range(4):
        seen = [number for is_check, at, samples in model.validated if not is_check and at == epoch for number in samples]
        assert seen == list(range(SAMPLES)), "the sanity check consumes no samples"


@pytest.mark.filterwarnings("ignore")
def test_lightnings_limits_begin_each_validation_at_the_first_sample(folder, tmp_path):
    lightning = pytest.importorskip("lightning")
    model = lightning_module(lightning)
    trainer = trainer_of(lightning, tmp_path, max_epochs=3, limit_train_batches=2, limit_val_batches=2)
    trainer.fit(model, loader(folder), loader(folder))
    assert [len(samples) for samples in model.trained.values()] == [8, 8, 8]
    assert [samples for is_check, _, samples in model.validated if not is_check] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 3


@pytest.mark.filterwarnings("ignore")
def test_lightning_resumes_within_an_epoch_from_its_checkpoint(folder, tmp_path):
    lightning = pytest.importorskip("lightning")
    whole, first, rest = (lightning_module(lightning) for _ in range(3))
    trainer_of(lightning, tmp_path, max_epochs=2).fit(whole, loader(folder, shuffle=True))
    save = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, "last", every_n_train_steps=3, save_top_k=1)
    trainer_of(lightning, tmp_path, max_steps=3, callbacks=[save], enable_checkpointing=True).fit(first, loader(folder, shuffle=True))
    assert len(first.trained[0]) == 12
    resumed = trainer_of(lightning, tmp_path, max_epochs=2)
    resumed.fit(rest, loader(folder, shuffle=True), ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert first.trained[0] + rest.trained[0] == whole.trained[0] and rest.trained[1] == whole.trained[1]


def test_accelerate_gives_every_sample_of_every_epoch(folder):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, train = accelerator.prepare(torch.nn.Linear(1, 1), None, loader(folder))
    assert optimizer is None and model is not None
    for _epoch in range(3):
        seen = [number for batch in train for number in accelerator.gather(batch).tolist()]
        assert seen == list(range(SAMPLES))


def test_lightning_and_accelerate_convert_a_batch(tmp_path):
    accelerate, fabric = pytest.importorskip("accelerate"), pytest.importorskip("lightning.fabric")
    pytest.importorskip("PIL.Image").new("RGB", (4, 4)).save(tmp_path / "0.png")
    decode = {"png": pinpool_loader.ImageDecoder(2, 2)}
    [batch] = loader(tmp_path / "0.png", batch_size=1, decode=decode, map=None)
    for convert in (accelerate.utils.send_to_device, fabric.utilities.move_data_to_device):
        converted, name = convert((batch, "name"), torch.device("cpu"))
        assert converted["png"].shape == (1, 2, 2, 3) and converted["labels"].tolist() == [0] and name == "name"


def test_a_stateful_dataloader_continues_in_an_epoch(folder):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    class Batches(torch.utils.data.IterableDataset):
        """The loader as a stateful dataset."""

        def __init__(self):
            self.loader = loader(folder, shuffle=True)

        def __iter__(self):
            return iter(self.loader)

        def state_dict(self):
            return self.loader.state_dict()

        def load_state_dict(self, state):
            self.loader.load_state_dict(state)

    def stateful():
        return torchdata.StatefulDataLoader(Batches(), batch_size=None, num_workers=0)

    whole = [batch.tolist() for batch in stateful()]
    first = stateful()
    batches = iter(first)
    taken = [next(batches).tolist() for _ in range(2)]
    resumed = stateful()
    resumed.load_state_dict(first.state_dict())
    assert taken + [batch.tolist() for batch in resumed] == whole


def test_a_state_of_prefetch_resumes_after_the_batch_that_it_yielded(folder):
    whole = [batch.tolist() for batch in loader(folder, shuffle=True)]
    batches = pinpool.torch.prefetch(loader(folder, shuffle=True), "cpu")
    for _, batch in zip(range(2), batches, strict=False):
        assert batch.tolist() in whole[:2]
    resumed = loader(folder, shuffle=True, state=batches.state_dict())
    assert [batch.tolist() for batch in pinpool.torch.prefetch(resumed, "cpu")] == whole[2:]
    if not torch.cuda.is_available():
        with pytest.raises(pinpool.BackendError, match="torch finds none"):
            pinpool.torch.prefetch([], "cuda")
    with pytest.raises(TypeError, match="a list has no state_dict"):
        pinpool.torch.prefetch([], "cpu").state_dict()


def worker(rank, world, folder, settings, port, out):
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    counts = []
    for _epoch in range(2):
        for batch in loader(folder, rank=rank, world_size=world, batch_size=10, **settings):
            counts.append(len(batch))
            torch.distributed.all_reduce(torch.ones(1))
    torch.distributed.barrier()
    out.put((rank, counts))


@pytest.mark.parametrize("settings", [{"even": True}, {"drop_last": True}], ids=str)
def test_ranks_under_gloo_do_not_hang(tmp_path, settings):
    context, world = torch.multiprocessing.get_context("spawn"), 3
    for samples in (99, 101):
        folder = tmp_path / str(samples)
        folder.mkdir()
        for number in range(samples):
            (folder / f"{number:03}").write_bytes(b"x")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        out = context.Queue()
        processes = [context.Process(target=worker, args=(rank, world, folder, settings, port, out)) for rank in range(world)]
        try:
            for process in processes:
                process.start()
            counts = dict(out.get(timeout=300) for _ in range(world))
        finally:
            for process in processes:
                process.kill()
                process.join()
        assert len({tuple(each) for each in counts.values()}) == 1 and counts[0]
