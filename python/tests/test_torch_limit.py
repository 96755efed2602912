"""The default limit of `pinpool.torch.install()`, without torch: a fake replaces the compiled allocator."""

import logging
import sys
import types

import pytest

import pinpool
import pinpool.torch
from pinpool import _device, _pinpool
from pinpool.torch import _allocator, _limit

GIB = 1 << 30
MEMORY = (128 * GIB, "cgroup limit /sys/fs/cgroup/memory.max")


@pytest.mark.parametrize(
    "settings, environ, gib, words",
    [
        ({}, {}, 96, ["three quarters of 128.0GiB", "cgroup limit /sys/fs/cgroup/memory.max"]),
        ({}, {"LOCAL_WORLD_SIZE": "8"}, 12, ["divided by 8 (LOCAL_WORLD_SIZE)"]),
        ({}, {"LOCAL_WORLD_SIZE": "1"}, 96, []),
        ({}, {"LOCAL_WORLD_SIZE": "several"}, 96, []),
        ({"max_bytes": None}, {"PINPOOL_MAX_BYTES": ""}, 96, []),
        ({"env": False}, {"PINPOOL_MAX_BYTES": "1GiB"}, 96, []),
    ],
)
def test_without_a_setting_it_is_three_quarters_divided_among_the_ranks(settings, environ, gib, words):
    share, line = _limit.default_limit(settings, environ, MEMORY)
    assert share == gib * GIB
    for word in [f"max={gib}.0GiB", "PINPOOL_MAX_BYTES", "install(max_bytes=...)", *words]:
        assert word in line
    assert ("divided" in line) == (gib != 96)


@pytest.mark.parametrize(
    "settings, environ",
    [
        ({"preset": "adaptive", "ledger": "none"}, {}),
        ({"max_bytes": "auto"}, {"PINPOOL_MAX_BYTES": "1GiB"}),
        ({}, {"PINPOOL_MAX_BYTES": " Auto "}),
        ({}, {"PINPOOL_PRESET": "Adaptive", "PINPOOL_LEDGER": " none "}),
        ({"preset": "adaptive", "ledger": "none"}, {"PINPOOL_PRESET": "tensorflow", "PINPOOL_LEDGER": "host"}),
    ],
)
def test_the_defaults_of_other_settings_keep_the_default_limit(settings, environ):
    assert _limit.default_limit(settings, environ, MEMORY) == _limit.default_limit({}, {}, MEMORY)


@pytest.mark.parametrize(
    "settings, environ",
    [
        ({"max_bytes": "1GiB"}, {}),
        ({}, {"PINPOOL_MAX_BYTES": "1GiB"}),
        ({"preset": "tensorflow"}, {}),
        ({}, {"PINPOOL_PRESET": "tensorflow"}),
        ({"ledger": "auto"}, {}),
        ({}, {"PINPOOL_LEDGER": "host"}),
    ],
)
def test_other_settings_disable_the_default_limit(settings, environ):
    assert _limit.default_limit(settings, environ, MEMORY) is None


def test_unknown_memory_leaves_the_default_and_a_small_one_a_granule():
    assert _limit.default_limit({}, {}, None) is None
    assert _limit.default_limit({}, {"LOCAL_WORLD_SIZE": "64"}, (8 << 20, "machine"))[0] == 2 << 20


@pytest.fixture
def stand_in(monkeypatch):
    for name in ("PINPOOL_MAX_BYTES", "PINPOOL_PRESET", "PINPOOL_LEDGER", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PINPOOL_DEVICE", "0")
    allocator = types.SimpleNamespace(**{f"pinpool_torch_{name}": lambda *_: 0 for name in ("check", "install", "uninstall")})
    monkeypatch.setattr(pinpool.torch._allocator, "load", lambda: allocator)
    monkeypatch.setattr(pinpool.torch, "_library", allocator)
    yield
    pinpool.torch.uninstall()


@pytest.mark.parametrize("settings, limit, lines", [({}, 12 * GIB, 1), ({"max_bytes": "64MiB"}, 64 << 20, 0)])
def test_install_logs_the_limit_if_it_is_the_default(stand_in, monkeypatch, caplog, settings, limit, lines):
    monkeypatch.setattr(_pinpool, "_host_memory", lambda: (16 * GIB, "machine"))
    with caplog.at_level(logging.INFO, logger="pinpool"):
        pool = pinpool.torch.install(backend="heap", **settings)
    assert pool.stats()["limits"]["max_bytes"] == limit
    logged = [text for text in caplog.messages if text.startswith("torch limit: ")]
    assert len(logged) == lines and all("three quarters of 16.0GiB (machine)" in text for text in logged)


@pytest.mark.parametrize(
    ("environ", "num_initialized", "is_warned"),
    [
        ({}, 0, False),
        ({"WORLD_SIZE": "1"}, 1, False),
        ({"WORLD_SIZE": "8"}, 0, True),
        ({}, 8, True),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, 8, False),
    ],
)
def test_a_limit_of_several_ranks_of_unknown_number_is_a_warning(stand_in, monkeypatch, caplog, environ, num_initialized, is_warned):
    distributed = types.ModuleType("torch.distributed")
    distributed.is_available, distributed.is_initialized = lambda: True, lambda: num_initialized > 0
    distributed.get_world_size = lambda: num_initialized
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO, logger="pinpool"):
        pinpool.torch.install(backend="heap")
    [record] = [record for record in caplog.records if record.getMessage().startswith("torch limit: ")]
    assert (record.levelno == logging.WARNING) == is_warned == ("LOCAL_WORLD_SIZE is not set" in record.getMessage())


def test_the_memory_of_this_process_is_known():
    total, origin = _pinpool._host_memory()
    assert total > 0 and (origin == "machine" or origin.startswith("cgroup limit /"))


def test_cuda_pins_the_pool_of_torch_unless_a_backend_is_named(stand_in, monkeypatch):
    built = []
    monkeypatch.setattr(_device, "torch_device", lambda: 3)
    monkeypatch.setattr(pinpool.torch, "Pool", lambda **settings: built.append(settings) or pinpool.Pool(env=False, backend="heap"))
    for variable, settings, backend, device in [
        (None, {}, "gpu", None),
        (" AUTO ", {"device": None}, "gpu", None),
        ("cuda", {}, None, None),
        (None, {"backend": "heap", "device": 1}, "heap", 1),
        ("cuda", {"env": False}, "gpu", 3),
        ("cuda", {"env": False, "device": None}, "gpu", 3),
    ]:
        monkeypatch.setenv("PINPOOL_BACKEND", variable) if variable else monkeypatch.delenv("PINPOOL_BACKEND", raising=False)
        pinpool.torch.install(**settings)
        pinpool.torch.uninstall()
        made = built.pop()
        assert (made.get("backend"), made.get("device")) == (backend, device)


@pytest.mark.parametrize(
    ("variables", "settings", "wait"),
    [
        ({}, {}, 1),
        ({"WAIT": ""}, {"wait": None, "on_full": "error"}, 1),
        ({"WAIT": "5s"}, {}, None),
        ({"WAIT": "5s"}, {"env": False}, 1),
        ({}, {"wait": 0}, 0),
        ({"ON_FULL": "pageable"}, {}, None),
        ({}, {"preset": "tensorflow"}, None),
    ],
)
def test_a_request_waits_for_one_second_unless_a_setting_changes_this(stand_in, monkeypatch, variables, settings, wait):
    built = []
    monkeypatch.setattr(pinpool.torch, "Pool", lambda **settings: built.append(settings) or pinpool.Pool(env=False, backend="heap"))
    for name in ("WAIT", "ON_FULL"):
        monkeypatch.delenv(f"PINPOOL_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"PINPOOL_{name}", value)
    pinpool.torch.install(**settings)
    assert built[0].get("wait") == wait


def test_a_pool_without_a_gpu_backend_is_refused(stand_in):
    pool = pinpool.Pool(env=False)
    if pool.stats()["backend"] in ("vmm", "register", "cuda"):
        pytest.skip("a GPU is here")
    with pytest.raises(pinpool.BackendError, match="needs the backend vmm, register or cuda"):
        pinpool.torch.install(pool)
    assert pinpool.torch.installed_pool() is None


@pytest.mark.parametrize(
    ("version", "hip", "said"),
    [("2.11.0+rocm6.4", "6.4", "built for ROCm, and pinpool pins memory with CUDA"), ("2.3.1+cu118", None, "2.3.1.* is too old .*2.11 or newer")],
)
def test_another_torch_is_refused_in_one_sentence(monkeypatch, version, hip, said):
    torch = types.ModuleType("torch")
    torch.__version__, torch.version = version, types.SimpleNamespace(hip=hip)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(pinpool.torch._allocator, "load", pinpool.torch._allocator.load.__wrapped__)
    with pytest.raises(pinpool.BackendError, match=said):
        pinpool.torch.install()
    assert pinpool.torch.installed_pool() is None


def test_a_second_pool_and_a_pool_with_settings_are_refused(stand_in, pool):
    with pytest.raises(TypeError, match="not both: max_bytes"):
        pinpool.torch.install(pool, max_bytes="1GiB")
    assert pinpool.torch.install(pool) is pool
    with pytest.raises(pinpool.AlreadyInstalledError, match="uninstall"):
        pinpool.torch.install(pool)


def test_an_uninstall_that_torch_refuses_raises_the_text(stand_in, monkeypatch):
    def refuse(left, error, error_bytes):
        error.value = b"no priority"
        return 2

    with monkeypatch.context() as patched:
        patched.setattr(pinpool.torch._library, "pinpool_torch_uninstall", refuse)
        with pytest.raises(pinpool.BackendError, match="torch's allocator was not restored: no priority"):
            pinpool.torch.uninstall()
    assert pinpool.torch.uninstall() == 0


def test_a_compilation_that_never_ends_is_an_error_that_names_the_lock(monkeypatch):
    monkeypatch.setattr(_allocator, "_COMPILE", "import time; time.sleep(300)")
    monkeypatch.setattr(_allocator, "_COMPILE_SECONDS", 0.2)
    with pytest.raises(pinpool.BackendError, match="not compiled within 0.2 s.*, delete the file `lock` of pinpool_torch_9_9_0_.*_EXTENSIONS_DIR"):
        _allocator._compile("9.9.0")
