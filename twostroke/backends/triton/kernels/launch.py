"""A kernel in Python. Its body is Triton's language, which no type checker reads."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import triton


@dataclass(frozen=True)
class Kernel:
    """`kernel[grid](...)` launches it: arguments in the kernel's order, then options (`num_warps`, `num_stages`).

    Attributes:
        function: Triton's. It is compiled when it is launched first, for each kind of its arguments.
        fuses: whether a multiplication and an addition may become one instruction, which rounds once. Each launch says
            so, since Triton's own default is another one from 3.10 on.
    """

    function: Any
    fuses: bool = True

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return partial(self.function[grid], enable_fp_fusion=self.fuses)


def kernel(function: Callable[..., object]) -> Kernel:
    """For a function in Triton's language."""
    return Kernel(triton.jit(function))


def unfused_kernel(function: Callable[..., object]) -> Kernel:
    """For one whose bits must not depend on what a compiler fuses: it may do so in one copy of a formula alone."""
    return Kernel(triton.jit(function), fuses=False)


def kernel_for_any(*names: str) -> Callable[[Callable[..., object]], Kernel]:
    """`kernel`, but the same for any value of these arguments: a kernel of another layout may add in another order."""
    return lambda function: Kernel(triton.jit(do_not_specialize=list(names))(function))
