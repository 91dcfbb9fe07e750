# SPDX-License-Identifier: MIT
"""Tensors of sharded training checkpoints, whole or a part, into numpy, torch or any framework.

    import unshard
    with unshard.open("/data/run/step100") as c:
        c.keys()
        w = c.load("model.lm_head.weight")                       # numpy, or torch where that is imported
        q = c.load("model.wq.weight", tp=(rank, size, 0))        # only this rank's rows are read
        sd = c.load_many("model.*", device="cuda:0", dtype="bfloat16")

Any format that unshardfs reads; `source` is a checkpoint, or the directory that shows it in a mount.
"""
import collections
import ctypes
import fnmatch
import os
import sys
import threading
import warnings
import weakref

from . import _ffi
from ._dlpack import Array
from ._ffi import Error
from ._types import CASTS, TYPES, dtype_name, numpy_dtype, packed_shape, torch_dtype

__all__ = ["Array", "Checkpoint", "Error", "Holder", "Info", "attach", "load", "load_many", "open", "version"]

Info = collections.namedtuple("Info", "key dtype shape role bytes fault")
_lock = threading.Lock()
_state = {}


def _library():
    with _lock:
        if "library" not in _state:
            _state["library"] = _ffi.load_library()
        return _state["library"]


def version():
    return _library().unshard_version().decode()


def open(source, **options):  # pylint: disable=redefined-builtin
    """A checkpoint. Options: cache_dir, index_memory, follow_symlinks, jobs, map, hf, dtype, module_weights,
    cache_size (bytes; 0: nothing on disk but the index)."""
    return Checkpoint(source, **options)


def load(source, key=None, **how):
    """One tensor of a checkpoint; or, by its path alone, of a mount: load("/mnt/run/step100/raw/lm_head.weight")."""
    if key is None:
        source, key = _split_path(source)
    with open(source) as c:
        return c.load(key, **how)


def load_many(source, keys=None, **how):
    with open(source) as c:
        return c.load_many(keys, **how)


def attach(source, device="cuda:0"):
    """What `unshard hold SOURCE` keeps in the memory of a device: one copy for all processes of this user."""
    return Holder(source, device)


def _split_path(path):
    """The checkpoint's directory and the key of a tensor's file in a mount."""
    path = os.path.abspath(os.fspath(path))
    try:
        key = os.getxattr(path, "user.unshard.key")
    except OSError:
        raise ValueError(f"unshard: {path} is no tensor's file in a mount: name the checkpoint and a key") from None
    folder = os.path.dirname(path)
    while folder != "/" and not os.path.exists(os.path.join(folder, ".unshard", "checkpoint.json")):
        folder = os.path.dirname(folder)
    return folder, key.decode("utf-8", "surrogateescape")


def _bytes(text):
    return os.fspath(text).encode("utf-8", "surrogateescape") if isinstance(text, (str, os.PathLike)) else bytes(text)


# ---- what is asked for ----

def _box(shape, index, tp):
    """start, count and the dimensions that an integer index takes away."""
    start, count, gone = [0] * len(shape), list(shape), []
    if index is not None and tp is not None:
        raise ValueError("unshard: slice or tp, not both")
    if tp is not None:
        rank, size, dim = tp
        if not 0 <= rank < size or not -len(shape) <= dim < len(shape):
            raise ValueError(f"unshard: tp={tp} of a tensor of shape {shape}")
        each = -(-shape[dim] // size)  # as torch.chunk and DTensor cut
        start[dim] = min(rank * each, shape[dim])
        count[dim] = min(each, shape[dim] - start[dim])
    if index is not None:
        _take_index(shape, index, start, count, gone)
    return start, count, gone


def _take_index(shape, index, start, count, gone):
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at:at + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    if len(parts) > len(shape):
        raise IndexError(f"unshard: {len(parts)} indices of a tensor of shape {shape}")
    for k, part in enumerate(parts):
        if isinstance(part, slice):
            first, end, step = part.indices(shape[k])
            if step != 1:
                raise IndexError("unshard: slices with a step are not read; cut what was loaded")
            start[k], count[k] = first, max(end - first, 0)
        else:
            number = part.__index__()
            if not -shape[k] <= number < shape[k]:
                raise IndexError(f"unshard: index {number} of dimension {k}, which has {shape[k]} elements")
            start[k], count[k] = number % shape[k], 1
            gone.append(k)


class _Wanted:
    """One part of a tensor as the library takes it, and the memory that it fills."""

    def __init__(self, checkpoint, key, dtype, index, tp, scale):
        self.info = checkpoint.info(key)
        self.part = _ffi.Part(size=ctypes.sizeof(_ffi.Part), tensor=checkpoint._number(key))
        start, count, self.gone = _box(self.info.shape, index, tp)
        if index is not None or tp is not None:
            self.part.start, self.part.count = _ffi.numbers(start), _ffi.numbers(count)
        if dtype is not None:
            self.part.dtype = dtype_name(dtype).encode()
        if scale is not None:
            self._take_scale(*scale)
        result, words = _ffi.Result(), ctypes.create_string_buffer(_ffi.ERROR)
        _ffi.check(checkpoint._call("measure", ctypes.byref(self.part), ctypes.byref(result), words), words)
        self.dtype, self.bytes = result.dtype.decode(), result.bytes
        self.shape = tuple(n for k, n in enumerate(result.shape[:result.nd]) if k not in self.gone)
        self.part.bytes = self.bytes

    def _take_scale(self, values, block):
        if len(block) != len(self.info.shape):
            raise ValueError(f"unshard: scale: {len(block)} lengths of blocks, one a dimension of {self.info.shape} are needed")
        flat = [float(v) for v in (values.flatten().tolist() if hasattr(values, "flatten") else values)]
        self.part.scale, self.part.scales = (_ffi.c_float * max(len(flat), 1))(*flat), len(flat)
        self.part.scale_block = _ffi.numbers(block)


# ---- where it goes ----

class _Numpy:
    def __init__(self, wanted, device):
        import numpy
        if device >= 0:
            raise ValueError("unshard: numpy is on the host; to=\"torch\" or to=\"dlpack\" are on devices too")
        self.result = numpy.empty(packed_shape(wanted.dtype, wanted.shape), numpy_dtype(wanted.dtype))
        self.address = self.result.ctypes.data


class _Torch:
    def __init__(self, wanted, device):
        import torch
        dtype = torch_dtype(wanted.dtype)
        shape = packed_shape(wanted.dtype, wanted.shape)
        where = "cpu" if device < 0 else f"cuda:{device}"
        self.result = torch.empty(shape, dtype=torch.uint8 if dtype is None else dtype, device=where)
        self.address = self.result.data_ptr()

    @staticmethod
    def settle(device):
        """Memory that torch hands out again may still be in use by what its stream has to do."""
        if device >= 0:
            import torch
            torch.cuda.current_stream(device).synchronize()


class _Dlpack:
    def __init__(self, wanted, device, checkpoint):
        if device < 0:
            owner = ctypes.create_string_buffer(max(wanted.bytes, 1))
            self.address = ctypes.addressof(owner)
        else:
            owner = _DeviceMemory(checkpoint, device, wanted.bytes)
            self.address = owner.address
        self.result = Array(self.address, packed_shape(wanted.dtype, wanted.shape), wanted.dtype, device, owner)


class _DeviceMemory:
    """Freed when nobody holds it any more; keeps its checkpoint open as long."""

    def __init__(self, checkpoint, device, size):
        address, words = _ffi.c_uint64(), ctypes.create_string_buffer(_ffi.ERROR)
        _ffi.check(checkpoint._call("device_alloc", device, size, ctypes.byref(address), words), words)
        self.address = address.value
        weakref.finalize(self, checkpoint._handle.free, device, self.address)


class _Handle:
    """What the library has open; closed when the checkpoint is, and no memory of it is left."""

    def __init__(self, library, pointer):
        self.library, self.pointer, self.pid = library, pointer, os.getpid()

    def free(self, device, address):
        if os.getpid() == self.pid:
            self.library.unshard_device_free(self.pointer, device, address, None)

    def __del__(self):
        if os.getpid() == self.pid:
            self.library.unshard_close(self.pointer)


class Checkpoint:
    """An open checkpoint. Any thread may use it; after a fork the child opens its own."""

    def __init__(self, source, *, cache_dir=None, index_memory=False, follow_symlinks=False, jobs=0, map=None, hf=None,
                 dtype=None, module_weights=False, cache_size=None):
        library = _library()
        texts = {"cache_dir": cache_dir, "map": map, "hf": hf, "dtype": dtype and dtype_name(dtype)}
        options = _ffi.Options(size=ctypes.sizeof(_ffi.Options), index_memory=index_memory, follow_symlinks=follow_symlinks,
                               jobs=jobs, module_weights=module_weights, cache_size=cache_size or 0, no_cache=cache_size == 0,
                               **{k: _bytes(v) for k, v in texts.items() if v is not None})
        pointer, words = _ffi.c_void_p(), ctypes.create_string_buffer(_ffi.ERROR)
        _ffi.check(library.unshard_open(_bytes(source), ctypes.byref(options), ctypes.byref(pointer), words), words)
        self.source = os.fspath(source)
        self._handle = _Handle(library, pointer.value)
        self._tensors = {}
        for n in range(library.unshard_count(pointer)):
            self._note(library, pointer, n)

    def _note(self, library, pointer, n):
        t = _ffi.Tensor()
        library.unshard_tensor(pointer, n, ctypes.byref(t))
        key = ctypes.string_at(t.key, t.key_len).decode("utf-8", "surrogateescape")
        fault = t.fault.decode("utf-8", "replace") if t.fault else None
        self._tensors[key] = n, Info(key, t.dtype.decode(), tuple(t.shape[:t.nd]), t.role.decode(), t.bytes, fault)

    def _call(self, function, *arguments):
        handle = self._handle
        if handle is None:
            raise ValueError(f"unshard: {self.source} is closed")
        if os.getpid() != handle.pid:
            raise RuntimeError("unshard: opened before a fork: open it again in this process")
        return getattr(handle.library, "unshard_" + function)(handle.pointer, *arguments)

    def close(self):
        self._handle = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def __repr__(self):
        return f"<unshard.Checkpoint {self.source!r}, {len(self)} tensors>"

    def __len__(self):
        return len(self._tensors)

    def __iter__(self):
        return iter(self._tensors)

    def __contains__(self, key):
        return key in self._tensors

    def keys(self):
        return list(self._tensors)

    def info(self, key):
        """Info(key, dtype, shape, role, bytes, fault)."""
        return self._tensors[key][1]

    def _number(self, key):
        return self._tensors[key][0]

    # ---- loading ----

    def load(self, key, device="cpu", dtype=None, slice=None, tp=None, to=None, scale=None):
        """A tensor, or a part of it, of which only the bytes that it needs are read.

        device  "cpu", "cuda", "cuda:N", or "auto": the GPU if there is one, else the host, with a warning
        dtype   what it is cast to: any of F64, F32, F16, BF16, F8_E4M3, F8_E5M2, in any spelling
        slice   an index: numpy.s_[0:10, ...]
        tp      (rank, size, dim): that rank's share of a dimension, as torch.chunk cuts it
        to      "numpy", "torch" or "dlpack" (an Array); else torch where that was imported, and numpy
        scale   (values, block): factors of blocks of elements, block lengths one a dimension (0: all of it)
        """
        want = _Wanted(self, key, dtype, slice, tp, scale)
        return self._run([want], device, to)[0]

    def load_many(self, keys=None, device="cpu", dtype=None, slices=None, tp=None, to=None, progress=None):
        """{key: tensor} in one go. `keys`: a pattern, several keys, or None: all of the model.

        dtype   of floating-point tensors of the model; others stay as they are
        slices  {key: index};  tp: {key: (rank, size, dim)}, or a function of Info that gives one or None
        progress(done, total): bytes
        """
        wanted = [self._wanted(k, dtype, slices or {}, tp) for k in self._select(keys)]
        return dict(zip((w.info.key for w in wanted), self._run(wanted, device, to, progress)))

    def load_into(self, key, tensor, slice=None, tp=None, scale=None):
        """Into a contiguous torch tensor (of the host or of a GPU), or numpy array: cast to its type. Returns it."""
        is_torch = hasattr(tensor, "data_ptr")
        if is_torch:  # what is to be conjugated or negated when it is read is no plain memory either
            contiguous = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        else:
            contiguous = tensor.flags.c_contiguous and tensor.flags.writeable
        if not contiguous:
            raise ValueError("unshard: load_into takes contiguous memory that can be written")
        info = self.info(key)
        dtype = None if info.fault else _type_into(tensor, info.dtype, is_torch)
        want = _Wanted(self, key, dtype, slice, tp, scale)
        if tuple(tensor.shape) != packed_shape(want.dtype, want.shape):
            raise ValueError(f"unshard: {key} has shape {want.shape}, the tensor {tuple(tensor.shape)}")
        device = -1
        if is_torch and tensor.device.type == "cuda":
            device = tensor.device.index
            _Torch.settle(device)
        elif is_torch and tensor.device.type != "cpu":
            raise ValueError(f"unshard: memory of {tensor.device.type} cannot be filled")
        want.part.address = tensor.data_ptr() if is_torch else tensor.ctypes.data
        self._fill([want], device)
        return tensor

    def _select(self, keys):
        if keys is None:
            return [k for k, (_, t) in self._tensors.items() if t.role == "model"]
        if isinstance(keys, str):
            found = [k for k in self._tensors if k == keys or fnmatch.fnmatchcase(k, keys)]
            if not found:
                raise KeyError(keys)
            return found
        return list(keys)

    def _wanted(self, key, dtype, slices, tp):
        info = self.info(key)
        cast = dtype if info.dtype in CASTS and info.role == "model" else None
        share = tp(info) if callable(tp) else (tp or {}).get(key)
        return _Wanted(self, key, cast, slices.get(key), share, None)

    def _run(self, wanted, device, to, progress=None):
        to = to or ("torch" if "torch" in sys.modules else "numpy")
        if to not in ("numpy", "torch", "dlpack"):
            raise ValueError(f"unshard: to={to!r} is none of numpy, torch and dlpack")
        number = self._device(device, to)
        results = []
        for w in wanted:
            if to == "dlpack":
                place = _Dlpack(w, number, self)
            else:
                place = (_Torch if to == "torch" else _Numpy)(w, number)
            w.part.address = place.address
            results.append(place.result)
        if to == "torch":
            _Torch.settle(number)
        self._fill(wanted, number, progress)
        return results

    def _fill(self, wanted, device, progress=None):
        parts = (_ffi.Part * max(len(wanted), 1))(*(w.part for w in wanted))
        words, raised = ctypes.create_string_buffer(_ffi.ERROR), []

        def watch(_, done, total):
            try:
                progress(done, total)
                return 0
            except BaseException as e:  # pylint: disable=broad-except
                raised.append(e)
                return 1

        callback = _ffi.WATCH(watch) if progress else _ffi.WATCH()
        code = self._call("load", parts, len(wanted), device, callback, None, None, words)
        if raised:
            raise raised[0]
        _ffi.check(code, words)

    def _device(self, device, to):
        """The number of a device, -1: the host."""
        kind, _, number = str(device).partition(":")
        if kind == "cpu":
            return _ffi.HOST
        if kind == "cuda":
            return int(number) if number else _current_device(to)
        if kind != "auto":
            raise ValueError(f"unshard: device {device!r} is none of cpu, cuda, cuda:N and auto")
        if to == "numpy":
            return _ffi.HOST
        why = self._no_device(0, to)
        if why is None:
            return _current_device(to)
        warnings.warn(f"unshard: loading to the host: {why}", RuntimeWarning, stacklevel=4)
        return _ffi.HOST

    def _no_device(self, number, to):
        """Why it cannot be used, or None."""
        if to == "torch":
            import torch
            if not torch.cuda.is_available():
                return "torch sees no CUDA device"
        address, words = _ffi.c_uint64(), ctypes.create_string_buffer(_ffi.ERROR)
        if self._call("device_alloc", number, 1, ctypes.byref(address), words) < 0:
            return words.value.decode("utf-8", "replace")
        self._handle.free(number, address.value)
        return None


class Holder:
    """Tensors in a holder's memory, mapped into this process. They are shared: who writes one writes it for all."""

    def __init__(self, source, device="cuda:0"):
        library = _library()
        kind, _, number = str(device).partition(":")
        if kind != "cuda":
            raise ValueError(f"unshard: device {device!r} is none of a holder")
        pointer, words = _ffi.c_void_p(), ctypes.create_string_buffer(_ffi.ERROR)
        self._number = int(number or 0)
        _ffi.check(library.unshard_hold_open(_bytes(source), self._number, ctypes.byref(pointer), words), words)
        self._handle = _HolderHandle(library, pointer.value)

    def load(self, key, dtype=None, start=None, count=None, to=None):
        """A tensor, or the box [start, start + count) of it, as a torch tensor (to="torch") or an Array (to="dlpack").

        It stays mapped for as long as this process holds it or the Holder.
        """
        handle = self._handle
        if handle is None or os.getpid() != handle.pid:
            raise ValueError("unshard: the holder is closed, or was attached before a fork")
        held, words = _ffi.Held(), ctypes.create_string_buffer(_ffi.ERROR)
        if (start is None) != (count is None) or (start is not None and len(start) != len(count)):
            raise ValueError(f"unshard: start {start} and count {count} do not go together")
        box = (None, None, 0) if start is None else (_ffi.numbers(start), _ffi.numbers(count), len(start))
        name = dtype_name(dtype).encode() if dtype is not None else None
        code = handle.library.unshard_hold_get(handle.pointer, _bytes(key), len(_bytes(key)), name, *box, ctypes.byref(held), words)
        _ffi.check(code, words)
        result = held.result
        array = Array(held.address, packed_shape(result.dtype.decode(), result.shape[:result.nd]), result.dtype.decode(),
                      self._number, handle)
        if (to or ("torch" if "torch" in sys.modules else "dlpack")) == "dlpack":
            return array
        import torch
        return torch.from_dlpack(array)

    def close(self):
        """Its memory is let go of with the last tensor of it."""
        self._handle = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class _HolderHandle:
    def __init__(self, library, pointer):
        self.library, self.pointer, self.pid = library, pointer, os.getpid()

    def __del__(self):
        if os.getpid() == self.pid:
            self.library.unshard_hold_close(self.pointer)


def _current_device(to):
    if to == "torch":
        import torch
        return torch.cuda.current_device() if torch.cuda.is_available() else 0
    return 0


def _type_into(tensor, stored, is_torch):
    """The type of the elements that a tensor takes; bytes take what has no type of its own there."""
    have = tensor.dtype
    if have == (torch_dtype(stored) if is_torch else numpy_dtype(stored)):
        return stored
    if not is_torch and have == TYPES[stored][1]:
        return stored
    plain = torch_dtype(stored) is None if is_torch else TYPES[stored][0] < 8 or TYPES[stored][1] == "V1"
    if str(have).endswith("uint8") and plain:
        return stored
    return dtype_name(have)
