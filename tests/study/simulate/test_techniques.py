"""Techniques in a simulation: the engine's own programs, and the steps that a plan counts for them."""

from typing import Any

import numpy as np
import pytest

from tests.page_audit import leaked
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.errors import InvalidRequest
from twostroke.models.cost import SequenceRows
from twostroke.study.plan.plan import RequestProfile, make_plan
from twostroke.study.roofline.machines import find_machine
from twostroke.study.roofline.named_models import find_model
from twostroke.study.roofline.roofline import Roofline
from twostroke.study.roofline.techniques import techniques
from twostroke.study.roofline.weight_formats import FORMATS, weight_format
from twostroke.study.simulate.engine_setup import EngineSetup, machine_setup
from twostroke.study.simulate.fleet import Fleet, FleetFaults, KvLink
from twostroke.study.simulate.simulation import Simulation
from twostroke.study.traffic.requests import PromptPiece, Replay, Traffic, TrafficRequest

PROMPT, OUTPUT = 1500, 6
MODEL = find_model("llama-3-8b").model
MACHINE = find_machine("h100")


def setup(method: str, **settings: Any) -> EngineSetup:
    whole = SchedulerConfig(max_step_tokens=8192)
    chosen: dict[str, Any] = {"weights": "bf16", "index": "off", "scheduler": whole} | settings
    return machine_setup("llama-3-8b", "h100", method=method, **chosen)


def served(made: EngineSetup, count: int = 1, output: int = OUTPUT, apart_s: float = 100.0) -> Simulation:
    times = [apart_s * i for i in range(count)]
    arrivals = [TrafficRequest(at, (PromptPiece(i, PROMPT),), output) for i, at in enumerate(times)]
    service = Simulation(Fleet(made), Traffic(arrivals, Replay(tuple(times))))
    service.run()
    assert [len(call.tokens) for call in service.calls] == [output] * count
    assert leaked(service) == 0
    return service


def decoded(roofline: Roofline, first: int) -> list[float]:
    """Seconds of each gap of an answer that is decoded alone from so many entries."""
    return [roofline.step([SequenceRows(1, first + i, 1)]).seconds for i in range(OUTPUT - 1)]


@pytest.mark.parametrize("method", ["plain", "repeat", "ptdo", "drop", "overfill"])
def test_a_request_alone_takes_what_the_plan_counts(method: str) -> None:
    """TTFT to the rounding, and each gap: what is kept is what decode reads, wherever its positions are."""
    timings = served(setup(method)).calls[0].timings
    technique = techniques(MODEL)[method]
    plan = make_plan(MODEL, MACHINE, weight_format("bf16"), 1, RequestProfile(PROMPT, OUTPUT), technique)
    assert timings.ttft == pytest.approx(plan.prefill.seconds)
    weights = FORMATS["int4-w4a8"] if method == "overfill" else weight_format("bf16")
    kept = technique.kept(PROMPT) + (4 if method == "ptdo" else 0)  # sinks
    expected = decoded(Roofline(MODEL, MACHINE, weights, 1), kept)
    assert timings.itls == pytest.approx(expected)


def test_guesses_stand_as_often_as_is_said() -> None:
    """Most guesses of a good student stand, and few of a bad one: the good one's answers take fewer steps."""
    steps = {share: served(setup("speculative-student", acceptance=share), 3, 60).num_steps for share in (0.05, 0.95)}
    assert steps[0.95] < 0.7 * steps[0.05]


@pytest.mark.parametrize("model", ["qwen3.5-4b", "glm-4.7-flash"])
def test_a_model_s_own_head_guesses(model: str) -> None:
    """The engine's own program: hidden states go in, its KV has room, and most guesses of a good head stand."""
    plain = machine_setup(model, "h200", weights="bf16")
    made = {
        share: machine_setup(model, "h200", weights="bf16", method="speculative-mtp", draft="mtp", acceptance=share)
        for share in (0.05, 0.95)
    }
    assert made[0.95].pages < plain.pages
    steps = {share: served(one, 3, 60).num_steps for share, one in made.items()}
    assert steps[0.95] < 0.7 * steps[0.05]


@pytest.mark.parametrize("model", ["llama-3-8b", "qwen3.5-4b"])
def test_refreshed_entries_take_the_place_of_others(model: str) -> None:
    """Values are joined within a page, whose contents a simulation does not have."""
    made = machine_setup(model, "h100", weights="bf16", method="refresh")
    assert served(made, 2, 130).num_steps > 2 * 130


@pytest.mark.parametrize("method", ["plain", "ptdo"])
def test_recurrent_layers_take_what_the_plan_counts(method: str) -> None:
    model, whole = find_model("qwen3.5-4b").model, SchedulerConfig(max_step_tokens=8192)
    made = machine_setup(model.name, "h100", index="off", scheduler=whole, method=method)
    timings = served(made).calls[0].timings
    load = RequestProfile(PROMPT, OUTPUT)
    plan = make_plan(model, MACHINE, weight_format("bf16"), 1, load, techniques(model)[method])
    assert timings.ttft == pytest.approx(plan.prefill.seconds)
    kept = PROMPT + (4 if method == "ptdo" else 0)
    assert timings.itls == pytest.approx(decoded(plan.roofline, kept))


def test_a_state_is_sent_with_its_rows() -> None:
    made = machine_setup("qwen3.5-4b", "h100")
    arrivals = [TrafficRequest(0.0, (PromptPiece(0, PROMPT),), OUTPUT)]
    service = Simulation(Fleet(made, 0, 1, 1, link=KvLink(1e9)), Traffic(arrivals, Replay((0.0,))))
    service.run()
    assert service.transfers.moved_bytes == made.model.moved_bytes(PROMPT)


def test_a_technique_under_a_load() -> None:
    """Requests side by side: repetition takes longer to the first token than one copy, and a draft has its own KV."""
    plain, twice = (served(setup(method), 12, apart_s=0.02) for method in ("plain", "ptdo"))
    assert np.mean([c.timings.ttft or 0 for c in twice.calls]) > 1.8 * np.mean(
        [c.timings.ttft or 0 for c in plain.calls]
    )
    draft = machine_setup("qwen2.5-7b", "h100", weights="bf16", method="speculative-draft", draft="qwen2.5-0.5b")
    without = machine_setup("qwen2.5-7b", "h100", weights="bf16")
    assert draft.pages < without.pages
    served(draft, 6, apart_s=0.02)
    compressed = machine_setup("qwen2.5-7b", "h100", weights="bf16", method="compress", draft="qwen2.5-0.5b")
    calls = served(compressed, 3).calls
    assert all(call.entered > PROMPT for call in calls), "the draft reads it all, and the model a part"


def test_what_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="guesses come from texts"):
        setup("lookup")
    with pytest.raises(InvalidRequest, match="no plan for the method 'poems'"):
        setup("poems")
    for apart in ({"together": 0, "prefill": 1, "decode": 1, "link": KvLink(1e9)}, {"faults": FleetFaults(life_s=1.0)}):
        with pytest.raises(InvalidRequest, match="workers of both strokes that do not die"):
            Fleet(setup("ptdo"), **apart)  # pyright: ignore[reportArgumentType]
    short = setup("repeat", kv_bytes=MODEL.kv_bytes(PROMPT + 200))
    with pytest.raises(InvalidRequest, match="has room for"):
        served(short)
