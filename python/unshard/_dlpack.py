# SPDX-License-Identifier: MIT
"""Memory of a device, or of the host, that other frameworks take over by DLPack."""
import ctypes
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_uint16, c_uint64, c_uint8, c_void_p

from ._types import TYPES

CPU, CUDA = 1, 2  # DLDeviceType


class DLTensor(Structure):
    _fields_ = [("data", c_void_p), ("device_type", c_int), ("device_id", c_int), ("ndim", c_int), ("code", c_uint8),
                ("bits", c_uint8), ("lanes", c_uint16), ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)),
                ("byte_offset", c_uint64)]


class DLManagedTensor(Structure):
    pass


DELETER = ctypes.CFUNCTYPE(None, POINTER(DLManagedTensor))
DLManagedTensor._fields_ = [("tensor", DLTensor), ("context", c_void_p), ("deleter", DELETER)]

_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [c_void_p, c_char_p, c_void_p]
_valid = ctypes.pythonapi.PyCapsule_IsValid
_valid.restype, _valid.argtypes = c_int, [c_void_p, c_char_p]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = c_void_p, [c_void_p, c_char_p]

_given = {}  # what others hold: address of the managed tensor -> all that must live as long


@DELETER
def _delete(managed):
    _given.pop(ctypes.addressof(managed.contents), None)


@ctypes.PYFUNCTYPE(None, c_void_p)
def _forget(capsule):
    """A capsule that nobody took."""
    if _valid(capsule, b"dltensor"):
        _given.pop(_pointer(capsule, b"dltensor"), None)


class Array:
    """Elements without a framework: hand it to torch.from_dlpack, cupy.from_dlpack, jax.dlpack, ...

    Where it is memory of a device it is freed with the last that holds it.
    """

    def __init__(self, address, shape, dtype, device, owner):
        self.address, self.shape, self.dtype, self._device, self._owner = address, tuple(shape), dtype, device, owner

    @property
    def device(self):
        return "cpu" if self._device < 0 else f"cuda:{self._device}"

    @property
    def nbytes(self):
        n = max(TYPES[self.dtype][0] // 8, 1)  # of types that share bytes the shape counts bytes
        for d in self.shape:
            n *= d
        return n

    def __dlpack_device__(self):
        return (CPU, 0) if self._device < 0 else (CUDA, self._device)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """All work on it is done: any stream may use it at once."""
        if TYPES[self.dtype][4] is None:
            raise BufferError(f"DLPack has no type for {self.dtype}")
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("no copies are made")
        code, bits = TYPES[self.dtype][4]
        shape = (c_int64 * max(len(self.shape), 1))(*self.shape)
        kind, number = self.__dlpack_device__()
        managed = DLManagedTensor(DLTensor(self.address or None, kind, number, len(self.shape), code, bits, 1, shape, None, 0),
                                  None, _delete)
        _given[ctypes.addressof(managed)] = (managed, shape, self)
        return _new(ctypes.addressof(managed), b"dltensor", ctypes.cast(_forget, c_void_p))
