"""The figures of `benchmarks/peer`: rates, medians, ratios, and the table made of them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.peer import turns
from benchmarks.peer.client import WorkerFailed
from benchmarks.peer.engines import ENGINES, OURS
from benchmarks.peer.figures import Rates, medians, rates, ratio, together, turn_order
from benchmarks.peer.protocol import Generated, Job
from benchmarks.peer.report import doubts, table
from benchmarks.peer.turns import Measured, Turn, Workload, load
from benchmarks.peer.weights import describe
from benchmarks.peer.worker import check


def turn(prefill: float, decode: float | None, others_cpu: float = 0.0) -> Turn:
    return Turn(Rates(1.0, prefill, decode, prefill), [], [], others_cpu)


def entry(engine: str, *turns: Turn, idle_cpu: float = 0.0) -> Measured:
    return Measured(engine, "1.0", turns=list(turns), peak_rss_bytes=300 << 20, idle_cpu_s=idle_cpu, waited_s=1.0)


def test_rates_of_one_sequence() -> None:
    found = rates(100, [[2.0, 2.5, 3.0]])
    assert found == Rates(prefill_s=2.0, prefill=50.0, decode=2.0, total=103 / 3)


def test_decode_of_a_batch_counts_from_the_last_first_token() -> None:
    # One sequence decodes while the other is prefilled: its second token counts in neither rate.
    found = rates(100, [[1.0, 3.0, 5.0], [4.0, 5.0, 6.0]])
    assert found == Rates(prefill_s=4.0, prefill=50.0, decode=3 / 2, total=206 / 6)


def test_one_token_has_no_decode_rate() -> None:
    assert rates(8, [[2.0]]).decode is None
    assert medians([rates(8, [[2.0]])]).decode is None


def test_each_figure_has_its_own_median() -> None:
    found = medians([Rates(1, 10, 3, 7), Rates(2, 30, 1, 8), Rates(9, 20, 2, 1)])
    assert found == Rates(prefill_s=2, prefill=20, decode=2, total=7)


def test_rounds_together_are_all_tokens_over_all_time() -> None:
    times = [[[1.0, 2.0, 4.0]], [[4.0, 5.0, 10.0]]]
    found = together([rates(100, one) for one in times])
    assert found.prefill_s == 2.5
    assert found.prefill == pytest.approx(200 / 5)
    assert found.decode == pytest.approx(4 / 9)
    assert found.total == pytest.approx(206 / 14)
    assert together([rates(8, [[2.0]])]).decode is None


def test_ratio_is_to_the_best_peer_and_never_to_ourselves() -> None:
    found = ratio({OURS: 30.0, "slow": 10.0, "fast": 20.0, "absent": None}, OURS)
    assert found is not None
    assert (found.value, found.peer) == (1.5, "fast")
    assert ratio({OURS: 30.0}, OURS) is None
    assert ratio({"fast": 20.0}, OURS) is None


def test_every_engine_is_first_once() -> None:
    names = ["a", "b", "c"]
    orders = [turn_order(names, number) for number in range(3)]
    assert [order[0] for order in orders] == names
    assert all(sorted(order) == names for order in orders)
    assert turn_order(names, 3) == names


@pytest.mark.parametrize("apart", [False, True])
def test_engines_of_which_two_do_not_fit_are_loaded_for_each_turn(monkeypatch: pytest.MonkeyPatch, apart: bool) -> None:
    events: list[str] = []

    class OneWorker:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> "OneWorker":
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        def close(self) -> None:
            events.append(f"{self.name} ends")

        def cpu_seconds(self) -> float:
            return 0.0

        def peak_rss_bytes(self) -> int:
            return 1

        def answer(self, job: Job) -> Generated:
            events.append(f"{self.name} answers {job.output_tokens}")
            if self.name == "b":
                raise WorkerFailed("out of memory")
            return Generated([[1, 2]], [[1.0, 2.0]])

    def loaded(measured: Measured, *_: object, **__: object) -> OneWorker:
        events.append(f"{measured.engine} is loaded")
        return OneWorker(measured.engine)

    monkeypatch.setattr(turns, "load", loaded)
    monkeypatch.setattr(turns, "SETTLE_S", 0)
    monkeypatch.setattr(turns, "PromptSource", lambda *_: SimpleNamespace(longest=99, make=lambda *_: [[1]]))
    found = turns.compare("m", Workload("w", 1, 20), ["a", "b"], 2, 1, Path(), lambda _: None, apart=apart)
    assert [(one.engine, len(one.turns), one.failure) for one in found] == [("a", 2, None), ("b", 0, "out of memory")]
    of_a = ["a answers 8", "a answers 20"]
    if apart:
        turn_of_a = ["a is loaded", *of_a, "a ends"]
        assert [one for one in events if one != "b ends"] == ["b is loaded", "b answers 8", *turn_of_a, *turn_of_a]
        assert events[2] == "b ends"
    else:
        assert events[:2] == ["a is loaded", "b is loaded"]
        assert [one for one in events if "a answers" in one] == [*of_a, "a answers 20"]
    assert events.count("b answers 8") == 1


def test_table_chooses_the_best_peer_for_each_column() -> None:
    entries = [
        entry(OURS, turn(100, 50), turn(300, 30), turn(200, 40)),
        entry("llama.cpp", turn(50, 80)),
        entry("openvino", turn(400, 20)),
        Measured("vllm", failure="no wheel for this machine"),
    ]
    lines = table("smollm2-135m", Workload("single", 512, 64), entries).splitlines()
    assert lines[0] == "**smollm2-135m**, 1 x (512 + 64) tokens"
    assert f"| {OURS} 1.0 | GGUF Q4_1 | 200 | 40.0 | 300 |" in lines
    assert f"| {OURS} / best peer |  | 0.50 (openvino) | 0.50 (llama.cpp) |  |" in lines
    assert "| the same, all rounds together |  | 0.41 (openvino) | 0.48 (llama.cpp) |  |" in lines
    assert "vllm: no wheel for this machine" in lines
    assert not any(line.startswith("| vllm") for line in lines)
    assert "total" not in lines[2]
    assert "total tok/s" in table("smollm2-135m", Workload("batch", 256, 64, batch=8), entries)


def test_a_disturbed_comparison_says_so() -> None:
    assert doubts([entry(OURS, turn(1, 1)), entry("vllm", turn(1, 1))]) == []
    found = doubts([entry(OURS, turn(1, 1, others_cpu=0.6), turn(1, 1)), entry("vllm", turn(1, 1), idle_cpu=0.3)])
    assert found == [
        "Not idle: vllm used 30% of a core while others had their turns.",
        "Not quiet: in 1 of 3 turns other processes took up to 60% of a core.",
    ]


@pytest.mark.parametrize(
    ("tokens", "times", "elapsed"),
    [
        ([[1]], [[0.5]], 0.5),  # stopped early
        ([[1, 2]], [[0.5]], 0.5),  # a time is missing
        ([[1, 2]], [[0.5, 0.4]], 0.5),  # backwards
        ([[1, 2]], [[-1.0, 0.5]], 0.5),  # another clock
        ([[1, 2]], [[0.1, 0.2]], 0.5),  # faster than the elapsed time
        ([[1, 2]], [[0.1, 0.6]], 0.5),  # later than the answer
        ([[1, 2], [1, 2]], [[0.1, 0.5], [0.1, 0.5]], 0.5),  # more sequences than requested
    ],
)
def test_a_worker_refuses_what_was_not_asked(tokens: list[list[int]], times: list[list[float]], elapsed: float) -> None:
    job = Job([[7, 8, 9]], output_tokens=2)
    check(job, Generated([[1, 2]], [[0.3, 0.5]]), 0.5)
    with pytest.raises(RuntimeError):
        check(job, Generated(tokens, times), elapsed)


@pytest.mark.parametrize(
    ("engine", "model", "weights"),
    [
        ("llama.cpp", "smollm2-135m", "GGUF Q4_1"),
        (OURS, "qwen2.5-coder-0.5b", "GGUF Q4_K_M"),
        ("vllm", "smollm2-135m", "bfloat16"),
    ],
)
def test_weights_are_named(engine: str, model: str, weights: str) -> None:
    assert describe(ENGINES[engine], model) == weights


def test_engines_do_without_amx_or_say_that_they_cant(tmp_path: Path) -> None:
    assert ENGINES["vllm"].variables(1, "", amx=False)["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    assert "ONEDNN_MAX_CPU_ISA" not in ENGINES["vllm"].variables(1, "")
    refused = Measured("llama.cpp")
    assert load(refused, "smollm2-135m", 8, 1, 1, tmp_path, lambda _: None, amx=False) is None
    assert "without AMX" in str(refused.failure)
