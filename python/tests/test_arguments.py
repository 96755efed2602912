"""Errors for wrong arguments name the argument, its value and what is accepted."""

import copy
import inspect
import pathlib
import pickle
import sys
from datetime import timedelta

import numpy as np
import pytest

import pinpool
import pinpool_loader
from helpers import heap
from pinpool import _arguments
from pinpool_loader import ImageDecoder


def load(pool, paths=__file__, **settings):
    return pinpool_loader.Loader(paths, pool=pool, **settings)


def decode(pool, images):
    return load(pool, batch_size=1, decode=images)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda pool: pinpool.Pool("64MiB"), TypeError, "positional"),
        (lambda pool: pinpool.Pool(_core=pool), TypeError, "_core is not a setting of a pool"),
        (lambda pool: type("Mine", (pinpool.Pool,), {}), TypeError, "pinpool.Pool cannot be subclassed"),
        (lambda pool: pinpool.Pool(wait=[]), TypeError, "wait must be a str, a number, .* not a list"),
        (lambda pool: pinpool.Pool(purple="1GiB"), TypeError, r'"purple" is not a setting of a pool; they are name, env, max_bytes, .*zero,'),
        (lambda pool: pinpool.Pool(max_bytes="lots"), pinpool.SettingError, "PINPOOL_MAX_BYTES=lots: .*like 2GiB"),
        (lambda pool: pinpool.Pool(max_bytes=1024, reserve=2048), ValueError, "PINPOOL_RESERVE=2KiB: exceeds PINPOOL_MAX_BYTES=1KiB"),
        (lambda pool: load(pool, purple=4), TypeError, "Loader has no argument 'purple'$"),
        (lambda pool: load(pool, batch_size=0), ValueError, "batch_size must be 1 or more, not 0"),
        (lambda pool: load(pool, batch_bytes="much"), pinpool.RequestError, "batch_bytes: `much` is not a size"),
        (lambda pool: load(pool, num_threads=5000), ValueError, "num_threads must be at most 1024, not 5000"),
        (lambda pool: load(pool, read_ahead=0), ValueError, "read_ahead must be 1 or more, not 0"),
        (lambda pool: load(pool, epochs_per_loop=-1), ValueError, "epochs_per_loop must be 1 or more, not -1"),
        (lambda pool: load(pool, rank=2, world_size=2), ValueError, "rank must be less than world_size=2, not 2"),
        (lambda pool: load(pool, seed=-3), ValueError, "seed must be 0 or more, not -3"),
        (lambda pool: load(pool, on_error="ignore"), ValueError, "on_error must be 'raise' or 'skip', not 'ignore'"),
        (lambda pool: load(3), TypeError, "pool must be a pinpool.Pool, not 3"),
        (lambda pool: load(pool, map=3), TypeError, "map must be a function of a batch, not 3"),
        (lambda pool: load(pool, num_map_threads="2"), TypeError, "num_map_threads must be an int, not '2'"),
        (lambda pool: load(pool, label_field=3), TypeError, "label_field must be the name of a field, such as 'cls', not 3"),
        (lambda pool: pinpool.Pool(name=3), TypeError, "name must be a str, not 3"),
        (lambda pool: pool.get(1.5), TypeError, "invalid size nbytes=1.5: must be an int, or text"),
        (lambda pool: pool.get(None), TypeError, "invalid size nbytes=None: must be an int"),
        (lambda pool: pool.get(True), TypeError, "invalid size nbytes=True: must be an int"),
        (lambda pool: pool.get(-1), ValueError, "invalid size nbytes=-1: must be 0 or more"),
        (lambda pool: pool.trim(np.int64(-5)), ValueError, "invalid size to_bytes=-5: must be 0 or more"),
        (lambda pool: pool.get(2**63), pinpool.RequestError, "cannot allocate .*: a buffer holds at most"),
        (lambda pool: pool.get("17179869183GiB"), pinpool.RequestError, "must be at most|a buffer holds at most"),
        (lambda pool: pool.get(1, timeout=float("nan")), pinpool.RequestError, "timeout must be 0 or more seconds, not NaN"),
        (lambda pool: pool.get(1, timeout=-1), pinpool.RequestError, "timeout must be 0 or more seconds, not -1"),
        (lambda pool: pool.get(1, timeout="soon"), pinpool.RequestError, "timeout: `soon` is not a time"),
        (lambda pool: pool.wait_for_reserve(1), TypeError, "positional"),
        (lambda pool: pinpool.SharedPool(100, 2, pool=pool).receive_next(1), TypeError, "positional"),
        (lambda pool: pool.trim(2**80), pinpool.RequestError, "invalid size to_bytes=1208925819614629174706176: must be at most"),
        (lambda pool: pool.set_max_bytes("few"), pinpool.RequestError, 'max_bytes: `few` is not a size.*, "auto", or "none" for no limit$'),
        (lambda pool: pool.set_max_bytes(1.5), TypeError, 'invalid size max_bytes=1.5: must be an int, .*, "auto", or "none" for no limit$'),
        (lambda pool: pool.set_max_bytes(None), TypeError, 'invalid size max_bytes=None: must be an int, .*, or "none" for no limit$'),
        (lambda pool: pool.get(1, timeout=[]), TypeError, r"timeout must be a number of seconds, a timedelta or text such as .*, not \[\]"),
        (lambda pool: pool.get(1, timeout=True), TypeError, "timeout must be a number of seconds, a timedelta or text such as .*, not True"),
        (lambda pool: pinpool.Pool(env=False, max_bytes=True), pinpool.SettingError, "MAX_BYTES=on: not a size"),
        (lambda pool: pinpool.Pool(max_byte=1), TypeError, r'"max_byte" is not a setting of a pool; did you mean max_bytes\?'),
        (lambda pool: load(pool, batch_size=True), TypeError, "batch_size must be an int, not True"),
        (lambda pool: load(pool, shuffle="yes"), TypeError, "shuffle must be True or False, not 'yes'"),
        (lambda pool: load(pool, shuffle=1), TypeError, "shuffle must be True or False, not 1"),
        (lambda pool: load(pool, label_field="cls", label_function="int"), TypeError, "label_function must be a function of .*, not 'int'"),
        (lambda pool: load(pool, num_workers=2), TypeError, "no argument 'num_workers'; num_threads= is"),
        (lambda pool: load(pool, collate_fn=list), TypeError, "no argument 'collate_fn'; map= takes"),
        (lambda pool: load(pool, batchsize=2), TypeError, r"no argument 'batchsize'; did you mean batch_size\?$"),
        (lambda pool: next(iter(load(pool)))["jpg"], KeyError, "has no field 'jpg': it has"),
        (lambda pool: pinpool.SharedPool(100, 2.5, pool=pool), TypeError, "num_buffers must be an int, not 2.5"),
        (lambda pool: pinpool.SharedPool(100, 1 << 20, pool=pool), pinpool.RequestError, "1048576"),
        (lambda pool: pinpool.SharedPool(100, 2, pool=pool, hugetlb=True), ValueError, "hugetlb must be 'off', 'auto' or '2MiB', not True"),
        (lambda pool: pinpool.SharedPool(100, 2, pool=pool, library="jax"), ValueError, "library must be 'numpy' or 'torch', not 'jax'"),
        (lambda pool: load(pool, device="cuda:0"), TypeError, "no argument 'device'; pinpool.torch.to_device"),
        (lambda pool: load(pool, progress=True), TypeError, "no argument 'progress'; .*tqdm"),
        (lambda pool: load(pool, epochs=2), TypeError, "no argument 'epochs'; epochs_per_loop= is"),
        (lambda pool: load(pool, even=1.5), TypeError, "even must be True or False, not 1.5"),
        (lambda pool: load(pool, open_archives="yes"), TypeError, "open_archives must be True or False, not 'yes'"),
        (lambda pool: pinpool.torch.uninstall(timeout="soon"), pinpool.RequestError, "timeout: `soon` is not a time"),
        (lambda pool: pinpool.torch.uninstall(timeout=-1), pinpool.RequestError, "timeout must be 0 or more seconds, not -1"),
        (lambda pool: pinpool.torch.uninstall(timeout=[]), TypeError, "timeout must be a number of seconds, a timedelta or text"),
        (lambda pool: load(pool, drop_last="no"), TypeError, "drop_last must be True or False, not 'no'"),
        (lambda pool: load(pool, even=True), ValueError, "even= needs batch_size=, without"),
        (lambda pool: load(pool, rank="0"), TypeError, "rank must be an int, not '0'"),
        (lambda pool: load(pool, world_size=True), TypeError, "world_size must be an int, not True"),
        (lambda pool: load(pool, world_size=8), TypeError, "rank= is missing: with world_size=8, "),
        (lambda pool: load(pool).state(), AttributeError, "use state_dict"),
        (lambda pool: load(pool).set_epoch(1), AttributeError, "use another `for` loop, which begins at the next epoch, or load_state_dict"),
        (lambda pool: ImageDecoder(224), TypeError, "missing 1 required positional argument: 'width'"),
        (lambda pool: ImageDecoder(224, 224, dtype="float32"), TypeError, "no argument 'dtype': images are uint8"),
        (lambda pool: ImageDecoder(224, 224, "CHW"), TypeError, "takes 3 positional arguments but 4 were given"),
        (lambda pool: ImageDecoder(224, "224"), TypeError, "width must be an int, not '224'"),
        (lambda pool: ImageDecoder(True, 224), TypeError, "height must be an int, not True"),
        (lambda pool: ImageDecoder(0, 1), ValueError, "height must be 1 or more, not 0"),
        (lambda pool: ImageDecoder(1, 1, max_pixels=0), ValueError, "max_pixels must be 1 or more, not 0"),
        (lambda pool: ImageDecoder(1, 1, layout="NHWC"), ValueError, "layout must be 'HWC' or 'CHW', not 'NHWC'"),
        (lambda pool: ImageDecoder(1, 1, fit="pad"), ValueError, "fit must be 'stretch' or 'crop', not 'pad'"),
        (lambda pool: load(pool, decode={"jpg": ImageDecoder(1, 1)}), ValueError, "decode= needs batch_size=, without"),
        (lambda pool: decode(pool, {}), ValueError, "decode has no field: pass None, or a dict such as {'jpg': "),
        (lambda pool: decode(pool, ["jpg"]), TypeError, r"decode must be a dict from field names to decoders, .*, not \['jpg'\]"),
        (lambda pool: decode(pool, {"jpg": "image"}), TypeError, "decode.'jpg'. must be a pinpool_loader.ImageDecoder, not 'image'; map="),
        (lambda pool: decode(pool, {"jpg;": ImageDecoder(1, 1)}), TypeError, "decode must have field names as keys"),
        (lambda pool: decode(pool, {3: ImageDecoder(1, 1)}), TypeError, "decode must have field names as keys"),
        (lambda pool: decode(pool, {"jpg": ImageDecoder(1, 1), "png;JPG": ImageDecoder(1, 1)}), ValueError, "names the field 'jpg' twice"),
        (lambda pool: decode(pool, {"jpg": ImageDecoder(1 << 30, 1 << 30)}), ValueError, "has more pixels"),
        (lambda pool: load(pool, 3), TypeError, "paths must be"),
        (lambda pool: load(pool, b"x"), TypeError, "not b'x'"),
        (lambda pool: load(pool, None), TypeError, "not None"),
        (lambda pool: load(pool, [".", b"x"]), TypeError, "each of paths.*os.fsdecode"),
        (lambda pool: pickle.dumps(load(pool)), TypeError, "rank= and world_size="),
        (lambda pool: pickle.dumps(pool.get(10)), TypeError, r"cannot be pickled.*bytes\(buf\)"),
        (lambda pool: copy.copy(pool.get(10)), TypeError, "memoryview"),
        (lambda pool: copy.deepcopy(pool.get(10)), TypeError, "memoryview"),
        (pickle.dumps, TypeError, "cannot be pickled.*SharedPool to DataLoader"),
        (copy.deepcopy, TypeError, "create a pool"),
        (lambda pool: pool.empty(3, order="K"), ValueError, "order must be 'C' or 'F', not"),
        (lambda pool: pool.empty(3, library="jax"), ValueError, "library must be 'numpy' or 'torch', not 'jax'"),
        (lambda pool: pool.get(100).release(stream=-1), pinpool.RequestError, "is not a CUDA stream handle"),
        (lambda pool: pool.get(100).release(stream=2**64), pinpool.RequestError, "is not a CUDA stream handle"),
        (lambda pool: heap(device="first"), pinpool.SettingError, "DEVICE=first: not a device number"),
        (lambda pool: pool.no_such, AttributeError, "no attribute 'no_such'"),
    ],
)
def test_a_wrong_argument_is_named(pool, call, error, said):
    with pytest.raises(error, match=said):
        call(pool)


def test_settings_accept_bools_and_devices_and_sizes_accept_numpy_integers():
    pool = heap(zero=True, maintenance_thread=False)
    assert len(pool.get(np.int64(7))) == 7 and len(pool.get("1KiB")) == 1024 and copy.copy(pool) is pool
    for device in ("cuda:0", "cuda", 0, "0", np.int8(0)):
        heap(device=device)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, None),
        (True, "on"),
        (False, "off"),
        (2e9, "2000000000"),
        (1e-7, "0.0000001"),
        (0.5, "0.5"),
        (np.float64(0.25), "0.25"),
        (float("inf"), "none"),
        (float("nan"), "NaN"),
        (7, "7"),
        (np.uint8(7), "7"),
        ("64MiB", "64MiB"),
        ("cuda:1", "cuda:1"),
        (timedelta(milliseconds=1500), "1.5"),
        (pathlib.Path("/tmp/a"), "/tmp/a"),
    ],
    ids=str,
)
def test_a_setting_becomes_the_text_of_its_variable(value, text):
    assert _arguments.setting_text("wait", value) == text


def test_submodules_are_imported_at_their_first_use(run_in_subprocess):
    run_in_subprocess("""
        import sys, pinpool
        assert "pinpool.torch" not in sys.modules and pinpool.torch.uninstall(timeout="10ms") == 0
    """)


def test_each_argument_of_torchs_loaders_is_answered(tmp_path, pool):
    data = pytest.importorskip("torch.utils.data")
    names = {"transform", "target_transform", "root", "loader", "is_valid_file", *inspect.signature(data.DataLoader.__init__).parameters}
    names |= {*inspect.signature(data.DistributedSampler.__init__).parameters, "world"}
    own = set(inspect.signature(pinpool_loader.Loader.__init__).parameters)
    signatures = [*inspect.signature(pinpool_loader.Loader).parameters.values(), *inspect.signature(ImageDecoder).parameters.values()]
    assert all(parameter.kind != parameter.VAR_KEYWORD for parameter in signatures), "only arguments that exist are shown"
    (tmp_path / "a").touch()
    for name in names - own - {"self"}:
        with pytest.raises(TypeError, match=f"no argument '{name}'; "):
            pinpool_loader.Loader(tmp_path, pool=pool, **{name: None})


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="the module has another name from 3.13 on")
def test_an_import_into_a_sub_interpreter_fails_once(run_in_subprocess):
    out, err = run_in_subprocess("""
        import _xxsubinterpreters as interpreters
        one = interpreters.create()
        try: interpreters.run_string(one, "import pinpool; pinpool.Pool(backend='heap')")
        except interpreters.RunFailedError as error: print(error)
    """)
    assert "thread" in out and "atexit" not in err, err
