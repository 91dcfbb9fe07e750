# SPDX-License-Identifier: MIT
"""Memory of the first CUDA device as tests see it: a stand-in's is the host's, a real one's its driver copies."""
import ctypes

_kept = {}


def _driver():
    if "driver" not in _kept:
        _kept["driver"] = ctypes.CDLL("libcuda.so.1")
    return _kept["driver"]


def is_standin():
    return hasattr(_driver(), "standin_live")


def why_none():
    """Why there is no device; None: there is one."""
    try:
        count, result = ctypes.c_int(), _driver().cuInit(0)
    except OSError as e:
        return str(e)
    if result == 0:
        result = _driver().cuDeviceGetCount(ctypes.byref(count))
    return f"the driver says {result}" if result else None if count.value else "the driver has no device"


def _call(name, *args):
    result = getattr(_driver(), name)(*args)
    if result:
        raise AssertionError(f"{name}: {result}")


def _enter():
    """The primary context, which the library uses too; it stays."""
    if "context" not in _kept:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        _call("cuInit", 0)
        _call("cuDeviceGet", ctypes.byref(device), 0)
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        _kept["context"] = context
    _call("cuCtxSetCurrent", _kept["context"])


def read(address, size):
    if is_standin():
        return ctypes.string_at(address, size)
    out = ctypes.create_string_buffer(max(size, 1))
    _enter()
    _call("cuMemcpyDtoH_v2", out, ctypes.c_uint64(address), ctypes.c_size_t(size))
    return out.raw[:size]


def fill(address, value, size):
    if is_standin():
        ctypes.memset(address, value, size)
        return
    _enter()
    _call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(value), ctypes.c_size_t(size))
    _call("cuCtxSynchronize")


def free_bytes():
    """Of a real device."""
    left, total = ctypes.c_size_t(), ctypes.c_size_t()
    _enter()
    _call("cuMemGetInfo_v2", ctypes.byref(left), ctypes.byref(total))
    return left.value


def name():
    out = ctypes.create_string_buffer(256)
    _call("cuInit", 0)
    _call("cuDeviceGetName", out, 255, 0)
    return out.value.decode()
