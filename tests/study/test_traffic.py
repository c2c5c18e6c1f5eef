"""Requests before they are sent: prompts in pieces, public traces, objectives."""

import json
from pathlib import Path
from typing import Any

import pytest

from twostroke.engine.timings import Timings
from twostroke.errors import InvalidRequest
from twostroke.study.traffic.objectives import Objectives
from twostroke.study.traffic.requests import ClosedLoop, OpenLoop, PromptPiece, Traffic, arrivals
from twostroke.study.traffic.trace import read_trace
from twostroke.study.traffic.workload_sampler import TokenRange, WorkloadSampler

LINES = [
    {"timestamp": 27000, "input_length": 1100, "output_length": 5, "hash_ids": [46, 47, 48]},
    {"timestamp": 30500, "input_length": 700, "output_length": 9, "hash_ids": [46]},
    {"timestamp": 28500, "input_length": 1300, "output_length": 7, "hash_ids": [46, 47, 52]},
    {"timestamp": 30500, "input_length": 1100, "output_length": 1, "hash_ids": [46, 47, 48]},
]


def written(directory: Path, *lines: Any) -> Path:
    path = directory / "trace.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_a_trace_is_ordered_and_begins_at_zero(tmp_path: Path) -> None:
    traffic = read_trace(written(tmp_path, *LINES, ""))
    assert [one.at for one in traffic.arrivals] == [0, 1.5, 3.5, 3.5]
    assert traffic.prompts.tolist() == [1100, 1300, 700, 1100]
    assert traffic.outputs.tolist() == [5, 7, 9, 1]
    assert traffic.rate == pytest.approx(3 / 3.5)
    assert traffic.arrivals[0].pieces == (PromptPiece(46, 512), PromptPiece(47, 512), PromptPiece(48, 76))
    assert traffic.arrivals[2].pieces == (PromptPiece(46, 512), PromptPiece(53, 188)), (
        "tokens without an id are the prompt's own"
    )
    assert len(read_trace(written(tmp_path, *LINES), 2).arrivals) == 2


AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225670,879,55
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
2024-05-10 00:00:02+00:00,76,15
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
45.5,GPT-4,417,276,693,API log
118,ChatGPT,1360,647,2007,Conversation log
"""
WITH_SESSIONS = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,1,3.2,ChatGPT,472,18,490,Conversation log
6,1,3.3,ChatGPT,100,7,107,Conversation log
"""


@pytest.mark.parametrize(
    ("text", "times", "prompts", "outputs"),
    [
        (AZURE_2023, [0, 4.314579, 4.541977], [374, 396, 879], [44, 109, 55]),
        (AZURE_2024, [0, 0.007405, 1.99007], [2162, 2399, 76], [5, 6, 15]),
        (BURSTGPT, [0, 40.5, 113], [472, 417, 1360], [18, 276, 647]),
        (WITH_SESSIONS, [0, 1], [472, 100], [18, 7]),
    ],
)
def test_public_tables(text: str, times: list[float], prompts: list[int], outputs: list[int], tmp_path: Path) -> None:
    """Azure's of 2023 and 2024, and BurstGPT's without its failures: no prompt shares anything with another."""
    path = tmp_path / "trace.csv"
    path.write_text(text)
    traffic = read_trace(path)
    assert [one.at for one in traffic.arrivals] == pytest.approx(times, abs=1e-6)
    assert (traffic.prompts.tolist(), traffic.outputs.tolist()) == (prompts, outputs)
    assert traffic.shared.tolist() == [0] * len(times)
    assert len(read_trace(path, 2).arrivals) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AZURE_2023.replace("2023-11-16 18:15:50.9951690", "soon"), "line 3: TIMESTAMP must be a date"),
        (AZURE_2023.replace("396", "-1"), "line 3: ContextTokens must be a number of tokens"),
        (AZURE_2023.replace(",109", ""), "line 3: GeneratedTokens must be"),
        (BURSTGPT.replace("118,", "never,"), "line 5: Timestamp must be seconds"),
        (BURSTGPT.replace("276", "x"), "line 4: Response tokens must be"),
        ("Time,Tokens\n1,2\n", "line 1: a request is a JSON object"),
        (BURSTGPT.splitlines()[0] + "\n", "has no request"),
    ],
)
def test_tables_that_are_none(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=message):
        read_trace(path)


def test_requests_are_split_by_shares() -> None:
    traffic = WorkloadSampler(1000, TokenRange(5, 9), TokenRange(1, 4), seed=2).traffic(OpenLoop(2.0))
    parts = traffic.split([0.7, 0.3])
    assert sorted([*parts[0].arrivals, *parts[1].arrivals], key=lambda one: one.at) == list(traffic.arrivals)
    assert len(parts[0].arrivals) == pytest.approx(700, abs=60)
    for shares in ([0.5, 0.4], [1.2, -0.2]):
        with pytest.raises(InvalidRequest, match="sum to 1"):
            traffic.split(shares)
    with pytest.raises(InvalidRequest, match="closed loop"):
        traffic.in_closed_loop(ClosedLoop(2)).split([0.5, 0.5])


def test_prompts_of_a_trace_share_what_their_ids_say(tmp_path: Path) -> None:
    traffic = read_trace(written(tmp_path, *LINES))
    assert traffic.shared.tolist() == [0, 1024, 512, 1099], "one token at least is computed"
    asks = traffic.token_requests(range(100_000))
    assert [len(ask.prompt) for ask in asks] == [1100, 1300, 700, 1100]
    assert asks[0].prompt == asks[3].prompt
    assert asks[0].prompt[:1024] == asks[1].prompt[:1024]
    assert asks[0].prompt[1024] != asks[1].prompt[1024]
    assert asks[2].prompt[512] != asks[0].prompt[512]


def test_the_same_requests_at_another_rate(tmp_path: Path) -> None:
    traffic = read_trace(written(tmp_path, *LINES))
    assert traffic.at_rate(3.0).rate == pytest.approx(3.0)
    assert [one.at for one in traffic.at_rate(3.0).arrivals] == pytest.approx([0, 3 / 7, 1, 1])
    drawn = WorkloadSampler(50, TokenRange(5, 9), TokenRange(1, 4), seed=2).traffic(OpenLoop(2.0, 0.5))
    assert [one.at for one in drawn.arrivals] == arrivals(50, 2.0, 0.5, 2).tolist()
    assert [one.at for one in drawn.at_rate(4.0).arrivals] == pytest.approx(arrivals(50, 4.0, 0.5, 2).tolist())
    assert drawn.at_rate(4.0).rate == 4.0
    assert traffic.in_closed_loop(ClosedLoop(3)).rate is None


def test_requests_that_come_at_once_get_times_with_a_rate(tmp_path: Path) -> None:
    together = read_trace(written(tmp_path, LINES[0], LINES[0], LINES[0]))
    assert together.rate is None
    assert [one.at for one in together.at_rate(2.0).arrivals] == arrivals(3, 2.0, 1.0, 0).tolist()
    assert together.at_rate(2.0).rate == 2.0


def test_drawn_prefixes_are_shared() -> None:
    traffic = WorkloadSampler(40, TokenRange(3, 3), TokenRange(1, 1), prefix_tokens=20, groups=4, seed=1).traffic(
        ClosedLoop(2)
    )
    assert sorted(traffic.shared.tolist()) == [0] * 4 + [20] * 36
    assert traffic.concurrency == 2


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[1]", "line 2: a request is a JSON object"),
        ("{", "line 2: a request is a JSON object"),
        (LINES[0] | {"timestamp": -1}, "timestamp must be milliseconds, 0 or more, not -1"),
        (LINES[0] | {"timestamp": True}, "timestamp"),
        (LINES[0] | {"input_length": 0}, "input_length must be a number of tokens, at least 1, not 0"),
        (LINES[0] | {"output_length": "9"}, "output_length"),
        (LINES[0] | {"hash_ids": [1, 2, 3, 4]}, "4 hash_ids are more than 1100 tokens"),
        (LINES[0] | {"hash_ids": [-1]}, "hash_ids must be"),
    ],
)
def test_a_line_that_is_no_request(line: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=why.replace("[", r"\[")):
        read_trace(written(tmp_path, LINES[0], line))


def test_no_requests_and_no_rate(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no request"):
        read_trace(written(tmp_path))
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(InvalidRequest, match="at least one request"):
        Traffic([], ClosedLoop(1))
    with pytest.raises(InvalidRequest, match="above 0 requests a second"):
        read_trace(written(tmp_path, *LINES)).at_rate(-1.0)
    with pytest.raises(InvalidRequest, match="no rate"):
        read_trace(written(tmp_path, LINES[0])).in_closed_loop(ClosedLoop(1)).at_rate(1.0)


@pytest.mark.parametrize("wrong", [{"ttft_s": 0.0}, {"itl_s": -1.0}, {"percent": 100.0}, {"percent": 0.0}])
def test_objectives_that_nothing_can_meet(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest):
        Objectives(**wrong)


def test_the_percentile_of_an_objective() -> None:
    timings = Timings(arrival=0.0, tokens=[1.0, 2.0, 3.0, 4.0, 14.0])
    assert Objectives(itl_s=1.0, percent=75).met(timings)
    assert not Objectives(itl_s=1.0, percent=76).met(timings)
