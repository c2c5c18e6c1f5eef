"""The type of a kernel in Python. Its body is Triton's language, which no type checker reads."""

from collections.abc import Callable
from typing import Protocol

import triton


class Kernel(Protocol):
    """`kernel[grid](...)` launches it: arguments in the kernel's order, then options (`num_warps`, `num_stages`)."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...


def kernel(function: Callable[..., object]) -> Kernel:
    """Compile a kernel when it is launched first, for each kind of its arguments."""
    return triton.jit(function)


def kernel_for_any(*names: str) -> Callable[[Callable[..., object]], Kernel]:
    """`kernel`, but the same for any value of these arguments: a kernel of another layout may add in another order."""
    return triton.jit(do_not_specialize=list(names))
