"""`twostroke generate`: the same answer as the API, its facts, and its messages for bad input."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from tests.thinking import thinking_model
from twostroke.api.conversation.fitting import cut_passages
from twostroke.api.llm import LLM
from twostroke.methods import METHODS, Method, method, registry

PROMPT = ("--prompt", "the quick brown fox")
PACE = ("ttft_s", "itl_mean_s", "itl_p99_s", "tpot_s", "prefill_tokens_per_second", "decode_tokens_per_second")
FIELDS = {"model", "prompt", "method", "method_facts", "backend", "thought", "text", "token_ids", "finish_reason",
          "outputs", "prompt_tokens", "prefilled_tokens", "cached_tokens", "cached_tokens_by_tier", "output_tokens",
          "kv_bytes", "definitions", "total_output_tokens_per_second", *PACE}  # fmt: skip


@pytest.fixture(scope="module")
def llm(tiny_directory: Callable[[str], Path]) -> LLM:
    return LLM(str(tiny_directory("llama")), kv_bytes=16 << 20, threads=1)


def test_json_is_what_the_api_gives(run_json: Callable[..., dict[str, Any]], tiny: str, llm: LLM) -> None:
    facts = run_json("generate", "-m", tiny, *PROMPT, "--raw", "--max-tokens", 9, "--ignore-eos")
    answer = llm.generate([PROMPT[1]], max_tokens=9, ignore_eos=True)[0]
    assert set(facts) == FIELDS
    assert facts["text"] == answer.text == facts["outputs"][0]["text"]
    assert facts["token_ids"] == [token.id for token in answer.tokens]
    assert facts["prompt_tokens"] == len(llm.tokenizer.encode(PROMPT[1]))
    assert (facts["output_tokens"], facts["finish_reason"], facts["cached_tokens"]) == (9, "length", 0)
    assert facts["kv_bytes"] == (facts["prompt_tokens"] + 8) * llm.pool.entry_bytes
    assert all(facts[name] > 0 for name in PACE)
    assert facts["tpot_s"] == pytest.approx(facts["itl_mean_s"]) == pytest.approx(1 / facts["decode_tokens_per_second"])
    assert facts["prefill_tokens_per_second"] == pytest.approx(facts["prompt_tokens"] / facts["ttft_s"])


FOUR_GUESSES = ("--method-option", "guesses=4", "--method-option", "adaptive=false")


@pytest.mark.parametrize(
    ("arguments", "chosen", "facts"),
    [
        (("--student", "int8", "--method", "overfill"), method("overfill"), None),
        (
            ("--student", "int8", "--method", "refresh", "--method-option", "every=4"),
            method("refresh", every=4),
            {"at": [4, 8], "teacher_tokens": 7, "looks": []},
        ),
        (
            ("--draft", "stored", "--method", "speculative", *FOUR_GUESSES, "--method-option", "draft=draft"),
            method("speculative", draft="draft", guesses=4, adaptive=False),
            {"rounds": 2, "guessed": 7, "accepted": 7},
        ),
        (
            ("--method", "snap", "--method-option", "window=2", "--method-option", "budget=4"),
            method("snap", window=2, budget=4),
            None,
        ),
        (
            ("--method", "drop", "--method-option", "by=attention", "--method-option", "window=3"),
            method("drop", by="attention", window=3),
            None,
        ),
    ],
)
def test_methods_that_take_more_than_the_model(
    arguments: tuple[str, ...],
    chosen: Method,
    facts: dict[str, Any] | None,
    run_json: Callable[..., dict[str, Any]],
    tiny: str,
) -> None:
    made = run_json("generate", "-m", tiny, *PROMPT, "--raw", "--max-tokens", 9, "--ignore-eos", *arguments)
    companions: dict[str, Any] = dict.fromkeys(chosen.companions, arguments[1])
    llm = LLM(tiny, kv_bytes=16 << 20, threads=1, **companions)
    expected = llm.generate([PROMPT[1]], method=chosen, max_tokens=9, ignore_eos=True)[0]
    assert made["text"] == expected.text
    assert made["method_facts"] == facts


def test_what_a_technique_counted_and_whom_it_left_idle(run: Callable[..., Result], tiny: str) -> None:
    arguments = ("generate", "-m", tiny, *PROMPT, "--max-tokens", 9, "--ignore-eos", "--method", "speculative")
    used = run(*arguments, *FOUR_GUESSES, "--student", "stored", "--method-option", "draft=student")
    assert "| rounds 2, guessed 7, accepted 7 |" in used.stderr
    assert "not use" not in used.stderr
    idle = run(*arguments, "--student", "stored")
    assert "method speculative does not use --student; with --method-option draft=student it does" in idle.stderr


def test_text_is_streamed_and_facts_go_to_stderr(run: Callable[..., Result], tiny: str, llm: LLM) -> None:
    result = run("generate", "-m", tiny, *PROMPT, "--max-tokens", 9)
    answer = llm.chat([{"role": "user", "content": PROMPT[1]}], max_tokens=9)
    assert result.stdout == answer.text + "\n"
    assert f"{answer.prompt_tokens} prompt + {len(answer.tokens)} output tokens" in result.stderr
    for fact in ("prefill", "decode", "TTFT", "ITL", "p99", "KV"):
        assert fact in result.stderr


def test_the_template_and_the_system_message(run_json: Callable[..., dict[str, Any]], tiny: str, llm: LLM) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the fox"}]
    facts = run_json("generate", "-m", tiny, "-p", "the fox", "--system", "be brief", "--max-tokens", 5)
    assert facts["text"] == llm.chat(messages, max_tokens=5).text


def test_a_thought_is_no_part_of_the_text(
    run: Callable[..., Result], run_json: Callable[..., dict[str, Any]], tiny_directory: Callable[[str], Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    model = str(thinking_model(tiny_directory("llama"), tmp_path, "open"))
    asked = ("generate", "-m", model, "-p", "the fox", "--max-tokens", 5)
    facts, raw = run_json(*asked), run_json(*asked, "--raw")
    assert (facts["text"], raw["thought"]) == ("", ""), "the template has opened a thought, and five tokens close none"
    assert facts["thought"] == facts["outputs"][0]["thought"] != ""
    assert raw["text"]
    assert run(*asked).stdout == "\n", "what is piped on is the answer"


def test_prompts_from_a_file_and_from_stdin(run_json: Callable[..., dict[str, Any]], tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("the lazy\ndog\n")
    one = run_json("generate", "-m", tiny, "--prompt-file", path, "--max-tokens", 4)
    two = run_json("generate", "-m", tiny, "--prompt", "-", "--max-tokens", 4, stdin="the lazy\ndog\n")
    three = run_json("generate", "-m", tiny, "--prompt-file", "-", "--max-tokens", 4, stdin="the lazy\ndog")
    piped = run_json("generate", "-m", tiny, "--max-tokens", 4, stdin="the lazy\ndog\n")
    named = run_json("generate", "the lazy\ndog", "-m", tiny, "--max-tokens", 4, stdin="something else")
    path.write_text("the lazy\ndog\n", encoding="utf-8-sig")  # as Notepad does
    marked = run_json("generate", "-m", tiny, "--prompt-file", path, "--max-tokens", 4)
    marked_pipe = run_json("generate", "-m", tiny, "--max-tokens", 4, stdin="\ufeffthe lazy\ndog\n")
    for other in (two, three, piped, named, marked, marked_pipe):
        assert (other["prompt"], other["token_ids"]) == ("the lazy\ndog", one["token_ids"])


def test_several_answers_with_logprobs(run_json: Callable[..., dict[str, Any]], tiny: str, llm: LLM) -> None:
    sampling: dict[str, Any] = {
        "max_tokens": 6,
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.9,
        "seed": 3,
        "n": 3,
        "logprobs": 2,
    }
    options = [part for name, value in sampling.items() for part in (f"--{name.replace('_', '-')}", value)]
    facts = run_json("generate", "-m", tiny, *PROMPT, "--raw", *options)
    answer = llm.generate([PROMPT[1]], **sampling)[0]
    assert [output["text"] for output in facts["outputs"]] == [output.text for output in answer.outputs]
    for output, expected in zip(facts["outputs"], answer.outputs, strict=True):
        assert [t["logprob"] for t in output["logprobs"]] == pytest.approx([t.logprob for t in expected.tokens])
        assert all(len(token["top"]) == 2 for token in output["logprobs"])


def test_several_answers_and_logprobs_for_people(run: Callable[..., Result], tiny: str) -> None:
    result = run("generate", "-m", tiny, *PROMPT, "--n", 2, "--max-tokens", 3, "--logprobs", 1)
    assert "2 answers at" in result.stderr
    assert "tok/s in all" in result.stderr
    assert result.stdout.startswith("[1] ")
    assert "\n[2] " in result.stdout
    assert result.stderr.count(" of ") == 6


def test_methods_and_their_options(run_json: Callable[..., dict[str, Any]], tiny: str, llm: LLM) -> None:
    from twostroke.methods import method

    options = ("--method", "repeat", "--method-option", "times=3", "--method-option", "sinks=2")
    facts = run_json("generate", "-m", tiny, *PROMPT, "--raw", "--max-tokens", 6, *options)
    expected = llm.generate([PROMPT[1]], max_tokens=6, method=method("repeat", times=3, sinks=2))[0]
    assert (facts["method"], facts["text"]) == ("repeat", expected.text)


def test_stop_strings(run_json: Callable[..., dict[str, Any]], tiny: str) -> None:
    whole = run_json("generate", "-m", tiny, *PROMPT, "--max-tokens", 30)["text"]
    stop = whole[len(whole) // 2 : len(whole) // 2 + 2]
    facts = run_json("generate", "-m", tiny, *PROMPT, "--max-tokens", 30, "--stop", stop, "--stop", "never this")
    assert facts["text"] == whole[: whole.index(stop)]
    assert facts["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("-m", "smollm2-135x", *PROMPT), 1, "unknown model"),
        (("-m", "/no/such/model.gguf", *PROMPT), 1, "/no/such/model.gguf"),
        (("-p", ""), 1, "text is empty"),
        ((*PROMPT, "--method", "overfill"), 1, "method overfill needs a student: give one with --student int4"),
        (
            (*PROMPT, "--method", "speculative", "--method-option", "draft=draft"),
            1,
            "needs a draft: give one with --dr",
        ),
        ((*PROMPT, "--student", "int5", "--method", "overfill"), 1, "weights must be one of stored, bf16, int8"),
        (("--prompt-file", "/no/such/file"), 1, "/no/such/file"),
        (("--prompt-file", "/bin/true"), 1, "not UTF-8"),
        ((), 2, "nothing was piped in"),
        (("the fox", *PROMPT), 2, "exactly one"),
        ((*PROMPT, "--prompt-file", "-"), 2, "--prompt"),
        ((*PROMPT, "--temperature", "-1"), 1, "temperature"),
        ((*PROMPT, "--temperature", "nan"), 1, "temperature"),
        ((*PROMPT, "--temperature", "warm"), 2, "--temperature"),
        ((*PROMPT, "--top-p", "0"), 1, "top_p"),
        ((*PROMPT, "--max-tokens", "-1"), 1, "max_tokens"),
        ((*PROMPT, "--n", "0"), 1, "n must be"),
        ((*PROMPT, "--method", "magic"), 1, "magic"),
        ((*PROMPT, "--method-option", "times"), 2, "key=value"),
        ((*PROMPT, "--method", "repeat", "--method-option", "times=0"), 1, "times"),
        ((*PROMPT, "--method", "repeat", "--method-option", "size=2"), 1, "size"),
        ((*PROMPT, "--system", "x", "--raw"), 2, "--system"),
        ((*PROMPT, "--kv-bytes", "much"), 2, "is no size"),
        ((*PROMPT, "--backend", "magic"), 1, "backend"),
        ((*PROMPT, "--dtype", "int3"), 1, "dtype"),
        ((*PROMPT, "--weights", "int5"), 1, "weights"),
        ((*PROMPT, "--device", "nowhere"), 1, "device"),
        ((*PROMPT, "--prefix-index", "magic"), 1, "prefix_index"),
        ((*PROMPT, "--threads", "0"), 1, "threads"),
        ((*PROMPT, "--unknown"), 2, "--unknown"),
    ],
)
def test_bad_input_is_told_in_a_line(
    run: Callable[..., Result], tiny: str, arguments: tuple[str, ...], code: int, message: str
) -> None:
    model = () if "-m" in arguments else ("-m", tiny)
    result = run("generate", *model, *arguments)
    assert result.exit_code == code
    assert result.stdout == ""
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    if code == 1:
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


def test_a_prompt_past_the_context(run: Callable[..., Result], tiny: str) -> None:
    result = run("generate", "-m", tiny, "-p", "the fox " * 3000, "--raw")
    assert result.exit_code == 1
    assert "2048" in result.stderr


@pytest.mark.models
def test_the_default_model_answers(run_json: Callable[..., dict[str, Any]]) -> None:
    from twostroke.models.checkpoints.catalog import DEFAULT_MODEL

    facts = run_json("generate", "-p", "What is the capital of France?", "--max-tokens", 24)
    assert facts["model"] == DEFAULT_MODEL
    assert "Paris" in facts["text"]


def test_the_default_model_is_the_same_everywhere(run: Callable[..., Result]) -> None:
    from twostroke.models.checkpoints.catalog import DEFAULT_MODEL

    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert f"MODEL ?= {DEFAULT_MODEL}\n" in makefile
    assert inspect.signature(LLM).parameters["model"].default == DEFAULT_MODEL
    for command in ("generate", "chat", "serve"):
        assert DEFAULT_MODEL in run(command, "--help").stdout


TECHNIQUE = """
from dataclasses import dataclass

from twostroke import Decode, Method, Prefill
from twostroke.fields import integer


@dataclass(frozen=True)
class Again(Method, name="again"):
    times: int = integer(2, least=1, most=4)

    def program(self, prompt):
        yield Decode((yield Prefill(prompt * self.times)))
"""


@pytest.fixture
def technique(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "mine.py").write_text(TECHNIQUE)
    yield tmp_path / "mine.py"
    METHODS.pop("again", None)
    registry.loaded_sources.clear()


def test_a_technique_from_a_file(
    run_json: Callable[..., dict[str, Any]], tiny: str, technique: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("generate", "-m", tiny, "-p", "the fox", "--raw", "--max-tokens", 4, "--method")
    facts = run_json(*common, "again", "--method-module", technique, "--method-option", "times=3")
    expected = run_json(*common, "repeat", "--method-option", "times=3", "--method-option", "keep=all")
    assert facts["token_ids"] == expected["token_ids"]
    assert facts["prefilled_tokens"] == 3 * facts["prompt_tokens"]
    METHODS.pop("again")
    registry.loaded_sources.clear()
    monkeypatch.setenv("TWOSTROKE_METHOD_MODULES", str(technique))
    assert run_json(*common, "again")["prefilled_tokens"] == 2 * facts["prompt_tokens"]


def test_a_technique_that_cannot_be_loaded(run: Callable[..., Result], tiny: str, technique: Path) -> None:
    technique.write_text(TECHNIQUE.replace("Prefill\n", "Prefil\n"))
    result = run("generate", "-m", tiny, *PROMPT, "--method-module", technique)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {technique} cannot be used: line 4: ImportError: cannot import name")
    assert result.stderr.count("\n") == 1


def test_passages_are_cut_to_a_budget(run: Callable[..., Result], tiny: str, llm: LLM) -> None:
    """As the shorter text, and told on stderr."""
    text = "the quick brown fox jumps\n\nover the lazy dog\n\nwho jumps?"
    [cut], left_out = cut_passages([{"role": "user", "content": text}], 6, llm.tokenizer)
    options = ("generate", "-m", tiny, "--max-tokens", 9, "--ignore-eos")
    shorter = run(*options, "--prompt", text, "--passage-budget", 6)
    assert left_out.passages == 2
    assert shorter.stdout == run(*options, "--prompt", cut["content"]).stdout
    assert left_out.text in shorter.stderr
