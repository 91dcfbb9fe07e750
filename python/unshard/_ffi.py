# SPDX-License-Identifier: MIT
"""libunshard by ctypes: lib/unshard.h in Python's words."""
import ctypes
import ctypes.util
import os
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p

HOST = -1
ERROR = 1536
DIMENSIONS = 64


class Options(Structure):
    _fields_ = [("size", c_size_t), ("cache_dir", c_char_p), ("index_memory", c_int), ("follow_symlinks", c_int), ("jobs", c_uint),
                ("map", c_char_p), ("hf", c_char_p), ("dtype", c_char_p), ("module_weights", c_int),
                ("cache_size", c_uint64), ("no_cache", c_int)]


class Tensor(Structure):
    _fields_ = [("key", POINTER(ctypes.c_char)), ("key_len", c_size_t), ("dtype", c_char_p), ("role", c_char_p),
                ("fault", c_char_p), ("nd", c_uint32), ("shape", POINTER(c_uint64)), ("bytes", c_uint64)]


class Part(Structure):
    _fields_ = [("size", c_size_t), ("tensor", c_size_t), ("dtype", c_char_p), ("start", POINTER(c_uint64)),
                ("count", POINTER(c_uint64)), ("scale", POINTER(c_float)), ("scales", c_size_t),
                ("scale_block", POINTER(c_uint64)), ("address", c_uint64), ("bytes", c_uint64)]


class Result(Structure):
    _fields_ = [("dtype", c_char_p), ("nd", c_uint32), ("shape", c_uint64 * DIMENSIONS), ("bytes", c_uint64)]


class Stats(Structure):
    _fields_ = [("size", c_size_t), ("read_bytes", c_uint64), ("sent_bytes", c_uint64), ("batches", c_uint64),
                ("direct", c_uint64), ("launches", c_uint64)]


class Held(Structure):
    _fields_ = [("address", c_uint64), ("result", Result)]


WATCH = ctypes.CFUNCTYPE(c_int, c_void_p, c_uint64, c_uint64)

FUNCTIONS = {
    "unshard_version": (c_char_p, []),
    "unshard_open": (c_int, [c_char_p, POINTER(Options), POINTER(c_void_p), c_char_p]),
    "unshard_close": (None, [c_void_p]),
    "unshard_count": (c_size_t, [c_void_p]),
    "unshard_tensor": (c_int, [c_void_p, c_size_t, POINTER(Tensor)]),
    "unshard_find": (c_int, [c_void_p, c_char_p, c_size_t, POINTER(c_size_t)]),
    "unshard_measure": (c_int, [c_void_p, POINTER(Part), POINTER(Result), c_char_p]),
    "unshard_load": (c_int, [c_void_p, POINTER(Part), c_size_t, c_int, WATCH, c_void_p, POINTER(Stats), c_char_p]),
    "unshard_hold_open": (c_int, [c_char_p, c_int, POINTER(c_void_p), c_char_p]),
    "unshard_hold_close": (None, [c_void_p]),
    "unshard_hold_get": (c_int, [c_void_p, c_char_p, c_size_t, c_char_p, POINTER(c_uint64), POINTER(c_uint64), c_uint32,
                                 POINTER(Held), c_char_p]),
    "unshard_hold_read": (c_int, [c_void_p, c_void_p, c_uint64, c_uint64, c_char_p]),
    "unshard_device_alloc": (c_int, [c_void_p, c_int, c_uint64, POINTER(c_uint64), c_char_p]),
    "unshard_device_free": (c_int, [c_void_p, c_int, c_uint64, c_char_p]),
    "unshard_device_read": (c_int, [c_void_p, c_int, c_void_p, c_uint64, c_uint64, c_char_p]),
}


def load_library():
    """$UNSHARD_LIBRARY, or libunshard.so.1 as the system finds it."""
    path = os.environ.get("UNSHARD_LIBRARY") or "libunshard.so.1"
    try:
        library = ctypes.CDLL(path)
    except OSError as e:
        raise ImportError(f"{path}: {e} (install libunshard, or name it by UNSHARD_LIBRARY)") from None
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Error(OSError):
    """What the library says went wrong: errno, and words that name the file and the reason."""


def check(code, words):
    if code < 0:
        raise Error(-code, words.value.decode("utf-8", "replace"))


def numbers(values):
    return (c_uint64 * max(len(values), 1))(*values)


__all__ = ["DIMENSIONS", "ERROR", "Error", "HOST", "Held", "Options", "Part", "Result", "Stats", "Tensor", "WATCH", "byref", "c_float",
           "c_size_t", "c_uint64", "c_void_p", "check", "load_library", "numbers"]
