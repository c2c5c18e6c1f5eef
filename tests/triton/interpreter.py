"""Changes Triton's interpreter for tests. Importing it is enough.

It works with NumPy from 2.4 on. And its products do not depend on where a row lies in a tile, as those of a GPU do not:
BLAS in float32 adds in an order that depends on it. In float64 sums of products of bfloat16 are exact, but for terms
2**30 times smaller than the largest. And it is quicker: functions that kernels call do not replace the language's own
ones anew, a type of a block is made once, and sums of integers are not computed a second time for a check of overflow
that only the option `debug` looks at. Each took a quarter of the time.
"""

# pyright: reportPrivateUsage=false

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton import knobs
from triton.language.semantic import TritonSemantic

_patch_tensor, _patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
_dot, _splat = interpreter.InterpreterBuilder.create_dot, interpreter.InterpreterBuilder.create_splat
_block_type, _broadcast = tl.core.block_type.__init__, TritonSemantic.broadcast_impl_value
_blocks: dict[Any, dict[str, Any]] = {}  # what is known of a type, by its elements and shape
_patched: set[str] = set()  # modules of the language, while a kernel runs
_dtype_of_scalar = cache(interpreter._get_np_dtype)


def _patch_tensor_for_numpy(tensor: Any, scope: Any) -> None:
    """Triton 3.6 keeps scalars as arrays of one element, which NumPy from 2.4 on does not convert to int."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _exact_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    if d.data.dtype != np.float32:
        return _dot(self, a, b, d, input_precision, max_num_imprecise_acc)
    sums = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
    return interpreter.TensorHandle(sums + d.data, d.dtype.scalar)


def _splat_of_what_it_is(self: Any, ret_ty: Any, arg: Any) -> Any:
    """A comparison's result is called what was compared. From 3.9 on, a mask that is made integers so is refused."""
    if arg.data.dtype == np.bool_:
        arg = interpreter.TensorHandle(arg.data, tl.int1)
    return _splat(self, ret_ty, arg)


@cache
def _modules(fn: Any) -> frozenset[str]:
    """Those of the language that a function sees."""
    return frozenset(value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core)


def _patch_once(fn: Any) -> Any:
    """For a kernel, and for a function that it calls if that sees another module. The kernel's end restores them."""
    if _modules(fn) <= _patched:
        return None
    scope: Any = _patch_language(fn)
    if not _patched:
        restore = scope.restore

        def ended() -> None:
            _patched.clear()
            restore()

        scope.restore = ended
    _patched.update(_modules(fn))
    return scope


def _dtype(tt_dtype: Any) -> Any:
    scalar = tt_dtype.scalar
    return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else _dtype_of_scalar(scalar)


def _counts(shape: Any) -> dict[str, Any]:
    """A tensor's number of entries and shape, as constants."""
    numel, sizes = tl.constexpr(math.prod(shape)), [tl.constexpr(size) for size in shape]
    return {"numel": numel, "shape": tl.core.tuple(sizes)}


_OF_SCALARS = _counts(())


def _block_type_once(self: Any, element_ty: Any, shape: Any) -> None:
    """Checks and names a type when it is first made, and remembers what came of it."""
    key = (element_ty.name, getattr(element_ty, "address_space", None), *shape)
    if key not in _blocks:
        _block_type(self, element_ty, shape)
        _blocks[key] = {**self.__dict__, "counts": _counts(self.shape)}
    self.__dict__.update(_blocks[key])


def _tensor(self: Any, handle: Any, type: Any) -> None:
    """Does what the constructor does, with counts that each type has once."""
    self.__dict__.update(type.counts if type.is_block() else _OF_SCALARS)
    self.handle, self.type, self.dtype = handle, type, type.scalar


def _broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
    """Nothing is to do where shapes are equal."""
    if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values:
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


if knobs.runtime.interpret:  # the compiler for a GPU makes types too
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    tl.core.block_type.__init__, tl.core.tensor.__init__ = _block_type_once, _tensor
    TritonSemantic.broadcast_impl_value = _broadcast_others
interpreter._patch_lang = _patch_once
interpreter._get_np_dtype = _dtype
interpreter._patch_lang_tensor = _patch_tensor_for_numpy
interpreter.InterpreterBuilder.create_dot = _exact_dot
interpreter.InterpreterBuilder.create_splat = _splat_of_what_it_is
