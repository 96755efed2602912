"""torch's C++ interface for host allocators: host_probe.cpp, compiled for the installed torch."""

import ctypes
from pathlib import Path

from torch.utils import cpp_extension

import pinpool.torch

_POINTER = ctypes.c_void_p


class _Functions(ctypes.Structure):
    _fields_ = [(name, _POINTER) for name in ("pool", "get", "put", "trim", "totals", "is_capturing", "record_foreign_buffer")]


class Block:
    def __init__(self, probe, memory, address, context):
        self.probe, self.memory, self.address, self.context = probe, memory, address, context

    def free(self):
        self.probe.library.probe_free(_POINTER(self.memory))


class Probe:
    def __init__(self):
        source = str(Path(__file__).with_name("host_probe.cpp"))
        self.library = ctypes.CDLL(cpp_extension.load("pinpool_host_probe", [source], is_python_module=False))
        for name in ("probe_allocate", "probe_allocator"):
            getattr(self.library, name).restype = _POINTER
        for name in ("probe_calls", "probe_history", "probe_segments"):
            getattr(self.library, name).restype = ctypes.c_size_t
        self.use_device()

    def _allocate(self, size):
        address, context, error = _POINTER(), _POINTER(), ctypes.create_string_buffer(2000)
        results = ctypes.byref(address), ctypes.byref(context), error, ctypes.c_size_t(len(error))
        memory = self.library.probe_allocate(ctypes.c_size_t(size), *results)
        return memory, address.value, context.value, error.value.decode()

    def allocate(self, size):
        memory, address, context, error = self._allocate(size)
        assert memory, error
        return Block(self, memory, address, context)

    def fails_to_allocate(self, size):
        memory, _, _, error = self._allocate(size)
        assert not memory
        return error

    def record_event(self, pointer, context, stream, device=0):
        return bool(self.library.probe_record_event(_POINTER(pointer), _POINTER(context), ctypes.c_int64(stream), ctypes.c_int32(device)))

    def __getattr__(self, name):
        return getattr(self.library, f"probe_{name}")

    def set(self, name, yes):
        """`name`: "is_capturing", "refuses_streams", "is_lost" or "has_no_context"."""
        ctypes.c_int.in_dll(self.library, f"probe_{name}").value = int(yes)

    def history(self):
        return self._text(self.library.probe_history)

    def stats(self):
        numbers = (ctypes.c_int64 * 11)()
        self.library.probe_stats(numbers)
        names = ("allocations", "allocated_bytes", "num_host_alloc")
        return {"active_requests": tuple(numbers[:4]), "active_bytes": tuple(numbers[4:8]), **dict(zip(names, numbers[8:], strict=True))}

    @staticmethod
    def _text(write):
        text = ctypes.create_string_buffer(10_000)
        length = write(text, ctypes.c_size_t(len(text)))
        return text.raw[:length].decode()

    def calls(self):
        """Returns the calls to the pool of `install_recorder` since the last call of this method."""
        return self._text(self.library.probe_calls)

    def install_recorder(self):
        """Installs a pool that records its calls. The caller must keep the result."""
        names = ("get", "put", "trim", "totals", "is_capturing", "record_foreign_buffer")
        addresses = [ctypes.cast(getattr(self.library, f"probe_pool_{name}"), _POINTER) for name in names]
        functions = _Functions(None, *addresses)
        error = ctypes.create_string_buffer(500)
        status = pinpool.torch._allocator.load().pinpool_torch_install(ctypes.byref(functions), error, ctypes.c_size_t(len(error)))
        assert status == 0, error.value
        return functions

    def uninstall(self):
        num_blocks_in_use, error = ctypes.c_size_t(), ctypes.create_string_buffer(500)
        uninstall = pinpool.torch._allocator.load().pinpool_torch_uninstall
        assert uninstall(ctypes.byref(num_blocks_in_use), error, ctypes.c_size_t(len(error))) == 0, error.value
        return num_blocks_in_use.value
