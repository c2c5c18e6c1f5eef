"""Liveness, readiness, and the age of the last step."""

import threading
from collections.abc import Callable

from tests.patience import PATIENCE_S
from tests.server.conftest import LOCAL, eventually, serving
from twostroke.api.llm import LLM
from twostroke.engine.engine import Engine


@LOCAL
def test_a_step_that_hangs(open_tiny: Callable[..., LLM]) -> None:
    """No new work is sent to it after a bound; the process is not restarted for it, and it may recover."""
    hangs, released = threading.Event(), threading.Event()
    with serving(open_tiny(), step_timeout_s=1000.0) as running, running.http() as http:
        rested = http.get("/health").json()
        assert rested["ready"]
        assert rested["step_age_s"] < 1000

        def hang(_: Engine) -> None:
            hangs.set()
            released.wait()

        engine = running.state.engine.served
        engine.call(hang)
        try:
            assert hangs.wait(PATIENCE_S)
            engine._between_steps_at -= 1000
            assert http.get("/health/ready").status_code == 503
            hung = http.get("/health/live")
            assert hung.status_code == 200
            assert hung.json()["step_age_s"] > 1000
            line = next(one for one in http.get("/metrics").text.splitlines() if one.startswith("twostroke_step_age"))
            assert float(line.split()[1]) > 1000
        finally:
            released.set()
        eventually(lambda: http.get("/health/ready").status_code == 200)


@LOCAL
def test_an_idle_engine_is_young(open_tiny: Callable[..., LLM]) -> None:
    """It looks about every second, so that the age can be alarmed on without knowing whether there is work."""
    with serving(open_tiny()) as running, running.http() as http:
        engine = running.state.engine.served
        engine._between_steps_at -= 1000
        assert http.get("/health").json()["step_age_s"] > 0
        eventually(lambda: http.get("/health").json()["step_age_s"] < 1000)
        assert http.get("/health/ready").status_code == 200
