"""GE numbers its dtypes twice: tensor descriptors use the protobuf's enum, attributes use `ge::DataType`."""

from __future__ import annotations

import torch

# Name in GE's operator prototypes: (number in a descriptor, number in an attribute, twin in torch).
_TABLE: dict[str, tuple[int, int, torch.dtype | None]] = {
    "DT_FLOAT": (1, 0, torch.float32), "DT_FLOAT16": (2, 1, torch.float16), "DT_INT8": (3, 2, torch.int8),
    "DT_UINT8": (4, 4, torch.uint8), "DT_INT16": (5, 6, torch.int16), "DT_UINT16": (6, 7, torch.uint16),
    "DT_INT32": (7, 3, torch.int32), "DT_INT64": (8, 9, torch.int64), "DT_UINT32": (9, 8, torch.uint32),
    "DT_UINT64": (10, 10, torch.uint64), "DT_BOOL": (11, 12, torch.bool), "DT_DOUBLE": (12, 11, torch.float64),
    "DT_STRING": (13, 13, None), "DT_COMPLEX64": (16, 16, torch.complex64),
    "DT_COMPLEX128": (17, 17, torch.complex128), "DT_BF16": (27, 27, torch.bfloat16),
    "DT_COMPLEX32": (32, 33, torch.complex32), "DT_HIFLOAT8": (33, 34, None),
    "DT_FLOAT8_E5M2": (34, 35, torch.float8_e5m2), "DT_FLOAT8_E4M3FN": (35, 36, torch.float8_e4m3fn),
}  # fmt: skip

UNDEFINED_ATTRIBUTE = 28  # ge::DataType's word for "as the input"

BY_NAME = {name: dtype for name, (_, _, dtype) in _TABLE.items() if dtype is not None}
_BY_DESCRIPTOR = {number: dtype for number, _, dtype in _TABLE.values() if dtype is not None}
_BY_ATTRIBUTE = {number: dtype for _, number, dtype in _TABLE.values() if dtype is not None}


def of_descriptor(number: int) -> torch.dtype | None:
    """What a tensor descriptor says; None for a type that torch has no twin of."""
    return _BY_DESCRIPTOR.get(number)


def of_attribute(number: int) -> torch.dtype | None:
    """What an attribute such as `dst_type` or `dtype` says; None for none, or a type that torch has no twin of."""
    return _BY_ATTRIBUTE.get(number)


def descriptor_number(dtype: torch.dtype) -> int:
    return next(number for number, found in _BY_DESCRIPTOR.items() if found is dtype)


def attribute_number(dtype: torch.dtype) -> int:
    return next(number for number, found in _BY_ATTRIBUTE.items() if found is dtype)


def promoted(dtype: torch.dtype) -> torch.dtype:
    """Where sums of this type are kept."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
