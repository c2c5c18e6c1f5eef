"""The routers that a simulated fleet may have, and a simulated call as they see it."""

from collections.abc import Iterator, Sequence

from twostroke.engine.router import KvAware, LeastLoaded, RoundRobin, RoutedCall, Router
from twostroke.errors import InvalidRequest
from twostroke.kv.kv_events import page_names
from twostroke.study.simulate.engine_setup import EngineSetup
from twostroke.study.simulate.prompts import prompt_tokens
from twostroke.study.simulate.simulated_request import SimulatedRequest
from twostroke.study.simulate.worker import SimulatedWorker

ROUTERS: Sequence[str] = ("round-robin", "least-loaded", "kv-aware")


def make_router(name: str) -> Router[SimulatedWorker]:
    """The router of that name. Raises InvalidRequest, which lists all."""
    if name not in ROUTERS:
        raise InvalidRequest(f"the router must be one of {', '.join(ROUTERS)}, not {name!r}")
    return RoundRobin() if name == "round-robin" else KvAware() if name == "kv-aware" else LeastLoaded()


def routed(call: SimulatedRequest, setup: EngineSetup) -> RoutedCall:
    """A call as routers see it: its load is the pages of its prompt and answer."""
    pages = -(-(call.asked.prompt_tokens + call.asked.output_tokens) // setup.page_size)
    return RoutedCall(pages, _names(call, setup))


def _names(call: SimulatedRequest, setup: EngineSetup) -> Iterator[bytes]:
    yield from page_names(prompt_tokens(call.asked.pieces, setup.vocab), setup.page_size)
