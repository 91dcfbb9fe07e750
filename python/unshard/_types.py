# SPDX-License-Identifier: MIT
"""Element types: the names of safetensors, and what numpy, torch and DLPack call them."""
import importlib

# name: bits, numpy, ml_dtypes, torch, DLPack's (code, bits) (dlpack.h 1.1)
TYPES = {
    "BOOL": (8, "?", None, "bool", (6, 8)),
    "U8": (8, "u1", None, "uint8", (1, 8)),
    "I8": (8, "i1", None, "int8", (0, 8)),
    "U16": (16, "<u2", None, "uint16", (1, 16)),
    "I16": (16, "<i2", None, "int16", (0, 16)),
    "U32": (32, "<u4", None, "uint32", (1, 32)),
    "I32": (32, "<i4", None, "int32", (0, 32)),
    "U64": (64, "<u8", None, "uint64", (1, 64)),
    "I64": (64, "<i8", None, "int64", (0, 64)),
    "F16": (16, "<f2", None, "float16", (2, 16)),
    "BF16": (16, "V2", "bfloat16", "bfloat16", (4, 16)),
    "F32": (32, "<f4", None, "float32", (2, 32)),
    "F64": (64, "<f8", None, "float64", (2, 64)),
    "C32": (32, "V4", None, "complex32", (5, 32)),
    "C64": (64, "<c8", None, "complex64", (5, 64)),
    "C128": (128, "<c16", None, "complex128", (5, 128)),
    "F8_E4M3": (8, "V1", "float8_e4m3fn", "float8_e4m3fn", (10, 8)),
    "F8_E5M2": (8, "V1", "float8_e5m2", "float8_e5m2", (12, 8)),
    "F8_E8M0": (8, "V1", "float8_e8m0fnu", "float8_e8m0fnu", (14, 8)),
    "F8_E4M3FNUZ": (8, "V1", "float8_e4m3fnuz", "float8_e4m3fnuz", (11, 8)),
    "F8_E5M2FNUZ": (8, "V1", "float8_e5m2fnuz", "float8_e5m2fnuz", (13, 8)),
    "F4": (4, "u1", None, "float4_e2m1fn_x2", None),
    "F6_E2M3": (6, "u1", None, None, None),
    "F6_E3M2": (6, "u1", None, None, None),
}
CASTS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


def dtype_name(dtype):
    """The name of what a caller means by "bf16", "bfloat16", torch.bfloat16, numpy.float32, ..."""
    text = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None) or str(dtype)
    text = text.rsplit(".", 1)[-1]
    for name, (_, numpy, ml, torch, _) in TYPES.items():
        short = name[0].lower() + name[1:] if name[0] in "FC" else name.lower()
        if text in (name, name.lower(), short, ml, torch) or (not numpy.startswith("V") and text == numpy.lstrip("<")):
            return name
    raise ValueError(f"unshard: {dtype!r} is no element type that is known")


def packed_shape(name, shape):
    """The shape of storage units: of types that share bytes the last dimension has bytes."""
    bits = TYPES[name][0]
    if bits >= 8:
        return tuple(shape)
    total = bits
    for n in shape:
        total *= n
    if shape and shape[-1] * bits % 8 == 0:
        return (*shape[:-1], shape[-1] * bits // 8)
    return (total // 8,)


def numpy_dtype(name):
    """ml_dtypes' where numpy has none and it is there, else plain bytes (as .npy files have them)."""
    numpy = importlib.import_module("numpy")
    if TYPES[name][2]:
        try:
            return numpy.dtype(getattr(importlib.import_module("ml_dtypes"), TYPES[name][2]))
        except (ImportError, AttributeError):
            pass
    return numpy.dtype(TYPES[name][1])


def torch_dtype(name):
    """None: this torch has none, the bytes are uint8."""
    torch = importlib.import_module("torch")
    return getattr(torch, TYPES[name][3], None) if TYPES[name][3] else None
