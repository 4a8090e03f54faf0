"""Triton's interpreter, in which kernels of Liger run on a CPU: `TRITON_INTERPRET=1`, and this is imported first.

Compiled kernels have two things that the interpreter of triton 3.7 lacks: floats are scalars with a dtype, and the
functions of libdevice are there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

_stock = interpreter._implicit_cvt


def _converted(value: Any) -> Any:
    if not isinstance(value, float):
        return _stock(value)
    return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)


interpreter._implicit_cvt = _converted

from liger_kernel.ops import geglu, rms_norm  # noqa: E402


@triton.jit
def _rsqrt(x):
    return 1 / tl.sqrt(x)


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


rms_norm.rsqrt = _rsqrt
geglu.tanh = _tanh
