"""Futures whose results another thread or another process computes."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def fulfil(future: "Future[T]", action: Callable[[], T]) -> None:
    """Run an action for whoever waits for a future, who gets its result or its error. Not if it was cancelled."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(action())
        except BaseException as error:  # else whoever waits would wait for ever
            future.set_exception(error)


def settle(future: "Future[Any]", value: Any, error: Exception | None) -> None:
    """Give whoever waits for a future its result, or its error if there is one. Not if it was cancelled."""
    if future.set_running_or_notify_cancel():
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
