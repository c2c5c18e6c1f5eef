"""What stands for a stroke's result while it is in flight, and where it failed."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

PENDING = object()  # the result of a stroke that is still in flight


@dataclass(frozen=True)
class PendingFuture:
    """The future of an `Await` stroke in place `slot`, for which a choice waits since `began`."""

    slot: int
    future: Future[Any]
    began: float


@dataclass(frozen=True)
class Raised:
    """The result of a stroke that failed, to be raised in the program."""

    error: BaseException
