"""Runs are written continuously, resume where they stopped, and are summarized correctly."""

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.study.evaluate.contenders import Contender, contender
from twostroke.study.evaluate.evaluation import Evaluation
from twostroke.study.evaluate.measures import MEASURES
from twostroke.study.evaluate.options import NAMES, EvaluationOptions
from twostroke.study.evaluate.report import Heading, write
from twostroke.study.evaluate.run_directory import ItemRecords, run_directory
from twostroke.study.evaluate.summary import summarize
from twostroke.study.evaluate.task import Task
from twostroke.study.evaluate.tasks import LongForm, NameIndex, Perplexity

TinyLLM = Callable[..., LLM]
METHODS = [contender("plain"), contender("repeat"), contender("ptdo", sinks=2)]
ALL = ("answers", "likelihood", "divergence", "judge")
OPTIONS: dict[str, Any] = {"limit": 5, "batch": 2, "max_tokens": 6, "positions": 6, "measures": ALL}


def evaluation(llm: LLM, task: Task | None = None, methods: list[Contender] = METHODS, **changes: Any) -> Evaluation:
    return Evaluation(llm, task or NameIndex(4), methods, EvaluationOptions(**(OPTIONS | changes)))


def untimed(lines: list[ItemRecords]) -> list[Any]:
    """Without the values that differ between runs."""
    rows = [json.loads(line.dump()) for line in lines]
    for row in rows:
        for record in row["measures"]["answers"].values():
            for field in ("ttft_s", "itl_mean_s", "itl_ratio", "decode_rate", "total_s", "late_s", "cached_tokens"):
                del record[field]
    return rows


def approximately(rows: Any) -> Any:
    """The reference's numbers depend on the batch in their last digits."""
    if isinstance(rows, float):
        return pytest.approx(rows, abs=1e-3)
    if isinstance(rows, dict):
        return {key: approximately(value) for key, value in rows.items()}
    return [approximately(row) for row in rows] if isinstance(rows, list) else rows


class Stopped(Exception):
    pass


def test_a_stopped_run_continues(tiny_llm: TinyLLM, tmp_path: Path) -> None:
    llm, heard = tiny_llm(), []

    def stop(done: int) -> None:
        if done == 4:
            raise Stopped

    whole = evaluation(llm).run(tmp_path / "whole", heard.append)
    assert heard == [0, 2, 4, 5]
    with pytest.raises(Stopped):
        evaluation(llm).run(tmp_path / "parts", stop)
    items = tmp_path / "parts" / "items.jsonl"
    assert items.read_text().count("\n") == 4
    text = items.read_text()
    items.write_text(text[:-30])  # as if killed while writing: the fourth is repeated
    heard.clear()
    parts = evaluation(llm).run(tmp_path / "parts", heard.append)
    assert heard == [3, 5]
    assert untimed(parts) == approximately(untimed(whole))
    assert [json.loads(line) for line in items.read_text().splitlines()] == [json.loads(line.dump()) for line in parts]

    again = evaluation(llm, limit=7).run(tmp_path / "parts")  # a larger limit goes on
    assert again[:5] == parts
    assert evaluation(llm, limit=2).run(tmp_path / "parts") == parts[:2]


def test_a_run_out_of_time_ends_with_the_items_it_has_and_continues(tiny_llm: TinyLLM, tmp_path: Path) -> None:
    llm = tiny_llm()
    for done in (2, 4, 5):  # a batch more each time
        run = evaluation(llm, minutes=0)
        lines = run.run(tmp_path)
        assert len(lines) == summarize(run, lines).n == done
    assert untimed(lines) == approximately(untimed(evaluation(llm).run()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "holds a run whose seed is 0, not 1: choose another directory"),
        ({"task": NameIndex(5)}, "whose task is"),
        ({"methods": METHODS[:2]}, "whose methods is"),
        ({"positions": 7}, "whose positions is 6, not 7"),
        ({"chat": False}, "whose chat is true, not false"),
        ({"temperature": 0.5}, "whose temperature is 0.0, not 0.5"),
    ],
)
def test_another_run_is_kept_apart(changes: dict[str, Any], message: str, tiny_llm: TinyLLM, tmp_path: Path) -> None:
    llm = tiny_llm()
    evaluation(llm, limit=1).run(tmp_path)
    before = (tmp_path / "items.jsonl").read_text()
    chosen: dict[str, Any] = {"limit": 1} | changes
    with pytest.raises(InvalidRequest, match=message):
        evaluation(llm, **chosen).run(tmp_path)
    assert (tmp_path / "items.jsonl").read_text() == before


def test_another_kv_dtype_is_another_run(tiny_llm: TinyLLM, tmp_path: Path) -> None:
    evaluation(tiny_llm(), limit=1).run(tmp_path)
    with pytest.raises(InvalidRequest, match="a run of other weights, or with K and V of another dtype or layout:"):
        evaluation(tiny_llm(kv_dtype="bfloat16"), limit=1).run(tmp_path)


def test_records(tiny_llm: TinyLLM) -> None:
    """Bytes against a computation by hand, shares against the records, and the baseline against itself."""
    llm = tiny_llm()
    run = evaluation(llm)
    lines = run.run()
    entry = llm.pool.entry_bytes
    for case, line in zip(run.cases, lines, strict=True):
        answers, size = line.measures["answers"], len(case.prompt)
        kept = {"plain": size, "repeat": 2 * size, "ptdo:sinks=2": size + 2}
        for name, entries in kept.items():
            record = answers[name]
            assert record["kept_bytes"] == entries * entry
            assert record["kv_bytes"] == (entries + record["output_tokens"] - 1) * entry
            assert record["kept_ratio"] == entries / (2 * size)
            assert line.measures["likelihood"][name]["kept_bytes"] == record["kept_bytes"]
            assert len(line.measures["likelihood"][name]["logprobs"]) == len(case.answers[0])
        assert answers["repeat"]["same"] is answers["ptdo:sinks=2"]["same_first"] is True
        assert line.measures["divergence"]["repeat"]["kl"] == pytest.approx([0] * 6, abs=1e-6)
        assert answers["plain"]["prefilled_tokens"] * 2 == answers["repeat"]["prefilled_tokens"] == 2 * size
    summary = summarize(run, lines)
    shares = {one.metric.key: one for one in summary.metrics["answers"] if one.metric.form == "share"}
    equal = [line.measures["answers"]["plain"]["same"] for line in lines]
    assert shares["same"].of("plain").value == sum(equal) / 5
    pair = next(pair for pair in shares["same"].pairs if (pair.first, pair.second) == ("plain", "repeat"))
    assert (pair.first_only, pair.second_only) == (0, 5 - sum(equal))
    assert json.loads(json.dumps(summary.as_dict()))["n"] == 5


def test_shared_prefills_change_nothing_but_the_time(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm()
    apart, shared = evaluation(llm).run(), evaluation(llm, timings=False).run()
    assert all(record["cached_tokens"] == 0 for record in apart[0].measures["answers"].values())
    assert any(record["cached_tokens"] for record in shared[0].measures["answers"].values())
    assert shared[0].measures["answers"]["plain"]["ttft_s"] is None
    assert untimed(shared) == approximately(untimed(apart))


def test_perplexity_is_the_models_own(tiny_llm: TinyLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    text = "the quick brown fox jumps over the lazy dog " * 4
    monkeypatch.setattr(
        "twostroke.study.evaluate.tasks.perplexity.articles", lambda: iter([text, "too short", text[4:]])
    )
    run = evaluation(llm, Perplexity(context=8, length=6), METHODS[:1], measures=())
    assert [case.item.id for case in run.cases] == ["article-0", "article-2"]
    ids = llm.tokenizer.encode(text)[:14]
    line = run.run()[0]
    kv, expected = llm.prefill(ids[:8]), []
    for token in ids[8:]:
        assert kv.tail is not None
        assert kv.tail.logits is not None
        expected.append(torch.from_numpy(kv.tail.logits).log_softmax(-1)[token].item())
        kv = llm.prefill([token], after=kv)
    assert line.measures["likelihood"]["plain"]["logprobs"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"measures": ("kl",)}, "no measure 'kl'; there are answers, likelihood, divergence, judge"),
        ({"measures": ("judge",)}, "measure judge reads the records of answers"),
        ({"task": LongForm(), "measures": ("likelihood",)}, "likelihood cannot be measured: the items of longform"),
        ({"methods": []}, "at least one method"),
        ({"methods": METHODS[:1] * 2}, "each once"),
        ({"baseline": "ptdo"}, "baseline 'ptdo' is not among the methods plain, repeat, ptdo:sinks=2"),
        ({"task": Perplexity(1 << 20)}, "perplexity has no item with these parameters"),
        ({"task": NameIndex(2000)}, r"item .* of nameindex: the prompt has .* leave room for an answer"),
        ({"limit": 0}, "limit must be an integer of at least 1"),
        ({"temperature": -1.0}, "temperature must be a number of at least 0"),
        ({"methods": [contender("student")]}, "method student needs a student: open the model with one"),
    ],
)
def test_bad_options(changes: dict[str, Any], message: str, tiny_llm: TinyLLM) -> None:
    with pytest.raises(InvalidRequest, match=message):
        evaluation(tiny_llm(), **changes)


def test_a_directory_that_is_none(tiny_llm: TinyLLM, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "items.jsonl").write_text("{}\n")
    with pytest.raises(InvalidRequest, match="cannot hold this run"):
        evaluation(tiny_llm()).run(tmp_path / "file")
    with pytest.raises(InvalidRequest, match="items of an unknown run"):
        evaluation(tiny_llm()).run(tmp_path)


@pytest.mark.parametrize("file", ["settings.json", "items.jsonl"])
@pytest.mark.parametrize("content", ["{", "[]", "null", "5"])
def test_files_of_another_form_are_damaged(file: str, content: str, tmp_path: Path) -> None:
    with run_directory(tmp_path, {}):
        pass
    (tmp_path / file).write_text(f"{content}\n")
    with pytest.raises(InvalidRequest, match="its files are damaged"), run_directory(tmp_path, {}):
        pass


def test_what_is_no_directory_is_said_without_numbers(tiny_llm: TinyLLM, tmp_path: Path) -> None:
    run = evaluation(tiny_llm())
    (tmp_path / "file").write_text("")
    for place, why in [("/dev/null", "it is no directory"), (f"{tmp_path}/file/below", "Not a directory")]:
        with pytest.raises(InvalidRequest) as error:
            run.run(Path(place))
        assert str(error.value) == f"{place} cannot hold this run: {why}"


def test_a_run_without_room_is_one_line_and_continues(tiny_llm: TinyLLM, tmp_path: Path) -> None:
    llm, done = tiny_llm(), []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def no_more(count: int) -> None:
        done.append(count)
        if count == 2:  # no file grows beyond what the first batch takes, and half a line
            size = (tmp_path / "items.jsonl").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, before[1]))

    try:
        with pytest.raises(InvalidRequest) as error:
            evaluation(llm).run(tmp_path, no_more)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(error.value) == f"{tmp_path} cannot hold this run: File too large"
    lines = evaluation(llm).run(tmp_path, done.append)
    assert done == [0, 2, 2, 4, 5]
    assert (tmp_path / "items.jsonl").read_text() == "".join(line.dump() for line in lines)


def test_two_runs_do_not_write_at_once(tiny_llm: TinyLLM, tmp_path: Path) -> None:
    llm = tiny_llm()
    refused: list[str] = []

    def another(done: int) -> None:
        with pytest.raises(InvalidRequest, match="another run writes there: wait for its end") as error:
            evaluation(llm).run(tmp_path)
        refused.append(str(error.value))

    lines = evaluation(llm).run(tmp_path, another)
    assert len(refused) == 4
    assert (tmp_path / "items.jsonl").read_text() == "".join(line.dump() for line in lines)
    assert evaluation(llm).run(tmp_path) == lines


def test_killed_before_its_settings_were_written(tiny_llm: TinyLLM, tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").touch()
    run = evaluation(tiny_llm(), limit=1)
    lines = run.run(tmp_path)
    assert json.loads((tmp_path / "settings.json").read_text()) == json.loads(json.dumps(run.settings))
    assert (tmp_path / "items.jsonl").read_text() == lines[0].dump()


def test_a_report_is_replaced_whole(tiny_llm: TinyLLM, tmp_path: Path) -> None:
    run = evaluation(tiny_llm(), limit=1)
    summary = summarize(run, run.run(tmp_path))
    write(tmp_path, summary.as_dict(), [Heading(1, "a run")])
    before = (tmp_path / "summary.json").read_text()
    (tmp_path / "report.md").unlink()
    (tmp_path / "report.md").mkdir()
    with pytest.raises(InvalidRequest, match=f"{tmp_path} cannot hold this run: it is a directory"):
        write(tmp_path, summary.as_dict(), [Heading(1, "a run")])
    assert (tmp_path / "summary.json").read_text() == before


def test_students_and_their_teacher(tiny_llm: TinyLLM) -> None:
    """The record has the cost of a refresh, and the judge's values are those of the teacher."""
    llm, methods = tiny_llm(student="int2"), ["teacher", "student", "overfill"]
    contenders = [*map(contender, methods), contender("refresh", every=2)]
    run = evaluation(llm, LongForm(), contenders, measures=("answers", "judge"), ignore_eos=True, max_tokens=7)
    assert run.settings["companions"] == {
        "student": {"model": f"{llm.name}@int2", "weights": llm.engine.models["student"].id}
    }
    for case, line in zip(run.cases, run.run(), strict=True):
        answers, judge = line.measures["answers"], line.measures["judge"]
        assert [record["output_tokens"] for record in answers.values()] == [7] * 4
        refreshed = answers["refresh:every=2"]
        assert refreshed["refreshes"] == refreshed["late_prefills"] == 3
        assert refreshed["teacher_tokens"] == refreshed["facts"]["teacher_tokens"] == 5  # the sixth is still pending
        assert answers["overfill"]["refreshes"] is None
        assert answers["overfill"]["same_first"] is True
        alone = llm.decode(llm.prefill(case.prompt, model="student"), model="student", max_tokens=7, ignore_eos=True)
        assert answers["student"]["token_ids"] == [token.id for token in alone]
        for name, record in judge.items():
            ids = answers[name]["token_ids"]
            rows = [llm.prefill([*case.prompt, *ids[:count]]).tail for count in range(7)]
            logits = [torch.from_numpy(row.logits) for row in rows]  # pyright: ignore
            logprobs = [row.log_softmax(-1)[id].item() for row, id in zip(logits, ids, strict=True)]
            assert record["logprobs"] == pytest.approx(logprobs, abs=2e-3)
            assert -record["judge_surprise"] == record["judge_tail"] == pytest.approx(sum(logprobs) / 7, abs=2e-3)


def test_sampled_answers_are_paired(tiny_llm: TinyLLM) -> None:
    """Random numbers of an item are the same for all methods, and differ between items and seeds."""
    llm, methods = tiny_llm(student="stored"), [contender("teacher"), contender("student"), contender("overfill")]
    made: list[list[int]] = []
    for seed in (0, 1):
        options: dict[str, Any] = {"measures": ("answers",), "temperature": 1.0, "ignore_eos": True, "seed": seed}
        for line in evaluation(llm, LongForm(), methods, limit=2, **options).run():
            ids = [record["token_ids"] for record in line.measures["answers"].values()]
            assert ids[0] == ids[1] == ids[2]
            made.append(ids[0])
    assert len({tuple(ids) for ids in made}) == 4


def test_the_measures_are_those_that_options_name() -> None:
    assert tuple(MEASURES) == NAMES


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_answer_that_others_are_led_through_ends_as_answers_do(
    tiny_llm: TinyLLM, monkeypatch: pytest.MonkeyPatch, ignore_eos: bool
) -> None:
    llm = tiny_llm()
    run = evaluation(llm, methods=[contender("plain")], measures=("divergence",), ignore_eos=ignore_eos, limit=1)
    ids = [token.id for token in llm.stream(run.cases[0].prompt, max_tokens=6, ignore_eos=True)]
    monkeypatch.setattr(llm.tokenizer, "eos_ids", frozenset({ids[2]}))
    (line,) = run.run()
    led = line.measures["divergence"]["plain"]["kl"]
    assert len(led) == (6 if ignore_eos else ids.index(ids[2]) + 1)
