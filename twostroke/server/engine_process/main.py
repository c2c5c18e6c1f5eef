"""The life of an engine's process: it opens a model, serves its server, and never outlives it."""

import ctypes
import logging
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection

from twostroke.errors import EngineFailed, TwostrokeError
from twostroke.methods import load_installed, load_module
from twostroke.server.engine_process.host import EngineHost
from twostroke.server.engine_process.messages import VERSION, Failed, OpenOptions
from twostroke.server.engine_process.step_note import StepNote
from twostroke.server.observability.logs import configure

log = logging.getLogger(__name__)
PR_SET_PDEATHSIG = 1  # prctl(2)
FAILED = 70  # exit code: a step has failed, or the model cannot be opened; the server was told why
SWITCH_INTERVAL_S = 0.001  # for sys.setswitchinterval: with Python's 0.005 a thread that reads messages delays steps


def main(file: int, note: int, parent: int) -> None:
    """Serve the connection of this file descriptor until it is closed; `parent` is the server's process."""
    _die_with(parent)
    for sig in (signal.SIGINT, signal.SIGTERM):  # the server says when to end; a service manager signals both
        signal.signal(sig, signal.SIG_IGN)
    with Connection(file) as pipe:
        try:
            options: OpenOptions = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the server has ended before it was ready
            sys.exit(0)
        try:
            if options.log_format == "json":
                configure("json")
            if options.version != VERSION:
                raise EngineFailed("this installation was changed while the server ran: start the server again")
            if options.cores:
                os.sched_setaffinity(0, options.cores)
            load_installed()
            for source in options.methods:
                load_module(source)
            llm = options.opener(**options.arguments)
        except (TwostrokeError, OSError, MemoryError) as error:
            told = error if isinstance(error, TwostrokeError) else EngineFailed(f"{type(error).__name__}: {error}")
            pipe.send_bytes(pickle.dumps(Failed(told)))
            sys.exit(FAILED)
        if options.log_format == "text":
            configure("text")  # from here on: until now people read notes
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            stopped = EngineHost(llm, pipe, StepNote(note), options.generation, options.tells_pages).serve()
        except EngineFailed:
            os._exit(FAILED)
        if stopped:
            llm.close()  # what waits to be written to a tier is written
    os._exit(0)


def _die_with(parent: int) -> None:
    """Let the kernel end this process when the server's ends, however it does (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
