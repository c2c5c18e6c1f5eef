"""Ctrl-C at every moment of a call in the main thread."""

import signal
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, cast


def show_ways_back(look: Callable[[FrameType, str, Any], None] | None) -> None:
    """Call `look` before each jump back to the start of a loop, or no more. Up to Python 3.11 nothing can."""
    if sys.version_info >= (3, 12):
        monitoring, tool = sys.monitoring, 3

        def jump(code: CodeType, start: int, to: int) -> None:
            if look is not None and to < start and sys.getprofile() is look:
                look(sys._getframe(1), "jump", None)

        if look is None:
            monitoring.set_events(tool, 0)
            monitoring.free_tool_id(tool)
            return
        monitoring.use_tool_id(tool, "ways back")
        monitoring.register_callback(tool, monitoring.events.JUMP, jump)
        monitoring.set_events(tool, monitoring.events.JUMP)


def at_each_moment(act: Callable[[], object], check: Callable[[], object], presses: int = 1) -> int:
    """Run `act` with Ctrl-C at its first moment, then with one at its second, and so on; `check` after each.

    A moment is where the interpreter looks for signals: a function begins, a function of C's has returned to one of
    Python's, or, where Python can tell, a loop goes back to its start. There the handler is called as the interpreter
    would. Returns the number of moments.
    """
    moment, reached, handler = 0, True, signal.getsignal(signal.SIGINT)
    assert handler is signal.default_int_handler
    while reached:
        reached, left = False, moment

        def look(frame: FrameType, event: str, _: Any) -> None:
            nonlocal left, reached
            if event not in ("call", "c_return", "jump"):
                return
            if left == 0:
                sys.setprofile(None)
                reached = True
                for _ in range(presses):
                    cast(Any, signal.getsignal(signal.SIGINT))(signal.SIGINT, frame)
            left -= 1

        show_ways_back(look)
        try:
            sys.setprofile(look)
            act()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
            show_ways_back(None)
        now = signal.signal(signal.SIGINT, handler)
        assert now is handler, "Ctrl-C stays postponed"
        check()
        moment += 1
    return moment - 1
