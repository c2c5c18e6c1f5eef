"""`twostroke chat` with lines piped in."""

import contextlib
import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from tests.cli.test_serve import MAIN, PAUSES
from tests.patience import PATIENCE_S
from tests.thinking import thinking_model, write
from twostroke.api.conversation import Conversation
from twostroke.api.llm import LLM
from twostroke.cli.chat import UNSTATED, Session
from twostroke.cli.report import DIM, PLAIN
from twostroke.engine.request import Request
from twostroke.sampling.params import SamplingParams

OPTIONS = ("--max-tokens", 8, "--temperature", 0)


def test_json_of_a_run(run_json: Callable[..., dict[str, Any]], tiny: str) -> None:
    facts = run_json("chat", "-m", tiny, *OPTIONS, "--system", "be brief", stdin="the fox\n\njumps over\n")
    conversation = Conversation(LLM(tiny, threads=1), "be brief", max_tokens=8)
    for text in ("the fox", "jumps over"):
        list(conversation.say(text))
    assert facts["messages"] == conversation.messages
    assert facts["kv_entries"] == len(conversation.kv)
    assert facts["kv_bytes"] == conversation.kv.nbytes
    first, second = facts["turns"]
    assert second["reused_tokens"] == first["entered_tokens"] + first["output_tokens"] - 1
    assert second["recomputed_tokens"] == 0
    assert all(turn["ttft_s"] > 0 and turn["decode_tokens_per_second"] > 0 for turn in facts["turns"])


def test_commands(run: Callable[..., Result], tiny: str, tmp_path: Path) -> None:
    talk = tmp_path / "talk"
    lines = ["the fox", "/kv", f"/save {talk}", "jumps", "/reset", "/kv", "/system be bold", "jumps", "/help"]
    lines += [f"/load {talk}", "jumps", "/magic", "/save", "/load", "/system", "/quit", "not said"]
    result = run("chat", "-m", tiny, *OPTIONS, stdin="\n".join(lines))
    assert result.exit_code == 0, result.output
    replies = result.stdout.splitlines()
    assert any("fingerprint" in line and "pending" in line for line in replies)
    assert "0 entries, no positions" in result.stdout
    assert "/save PATH" in result.stdout
    assert "there is no command /magic" in result.stderr
    assert "/save needs a path" in result.stderr
    assert "user: the fox" in result.stderr
    assert result.stderr.count("TTFT") == 4


def test_undo_and_retry(run_json: Callable[..., dict[str, Any]], tiny: str) -> None:
    """The conversation is what it would be without what was taken back, and the same KV is used again."""
    plain = run_json("chat", "-m", tiny, *OPTIONS, stdin="the fox\njumps\n")
    undone = run_json("chat", "-m", tiny, *OPTIONS, stdin="the fox\nover\n/undo\njumps\n")
    assert undone["messages"] == plain["messages"]
    assert undone["turns"][2]["reused_tokens"] == plain["turns"][1]["reused_tokens"]
    retried = run_json("chat", "-m", tiny, *OPTIONS, stdin="the fox\n/retry\njumps\n")
    assert retried["messages"] == plain["messages"]
    drawn = run_json("chat", "-m", tiny, "--max-tokens", 8, "--temperature", 1, "--seed", 3, stdin="the\n/retry\n")
    assert len(drawn["messages"]) == 2
    assert drawn["messages"][1]["content"] == drawn["turns"][1]["text"] != drawn["turns"][0]["text"]


def test_nothing_to_take_back(run: Callable[..., Result], tiny: str) -> None:
    assert "there is no turn to take back" in run("chat", "-m", tiny, *OPTIONS, stdin="/undo\n").stderr


def test_a_question_of_several_lines(run_json: Callable[..., dict[str, Any]], tiny: str) -> None:
    lines = '"""the fox\n\n  jumps\n"""\n"""over"""\n"""and more\n'
    asked = run_json("chat", "-m", tiny, *OPTIONS, stdin=lines)["messages"][::2]
    assert [one["content"] for one in asked] == ["the fox\n\n  jumps", "over", "and more"]


def test_a_question_from_an_editor(
    run_json: Callable[..., dict[str, Any]], run: Callable[..., Result], tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", "sed -i s/fox/dog/")
    asked = run_json("chat", "-m", tiny, *OPTIONS, stdin="the fox\n/edit\n")["messages"]
    assert [one["content"] for one in asked[::2]] == ["the dog"]
    monkeypatch.setenv("EDITOR", "/no/editor")
    assert "the editor '/no/editor' failed" in run("chat", "-m", tiny, *OPTIONS, stdin="/edit\n").stderr


def test_a_cut_answer_says_so(run: Callable[..., Result], tiny: str) -> None:
    for command in (("chat",), ("generate", "-p", "the fox")):
        told = run(*command, "-m", tiny, *OPTIONS, "--ignore-eos", stdin="the fox\n").stderr
        assert told.count("the answer is cut after 8 tokens: --max-tokens allows no more") == 1
    small = ("--kv-bytes", 96 * 768, "--backend", "reference", "--max-tokens", 2000, "--ignore-eos")
    assert "there is no room for more" in run("generate", "-p", "the fox", "-m", tiny, *small).stderr


def test_a_terminal(native_directory: Path, tmp_path: Path) -> None:
    """What is pasted is one question, and the next session finds it in its history."""
    talk = tmp_path / "talk"
    command = [sys.executable, "-m", "twostroke", "chat", "-m", str(native_directory)]
    command += ["--max-tokens", "3", "--threads", "1"]
    environment = os.environ | {"TWOSTROKE_HOME": str(tmp_path), "TERM": "xterm"}
    for keys, text in (
        (b"\x1b[200~the fox\njumps\x1b[201~\r", b"the fox\\njumps"),
        (3 * b"\x1b[A" + b"\r", b"the fox jumps"),
    ):
        terminal, other = pty.openpty()
        with subprocess.Popen(command, stdin=other, stdout=other, stderr=subprocess.PIPE, env=environment) as process:
            os.close(other)
            os.write(terminal, keys + f"/save {talk}\r/quit\r".encode())
            with contextlib.suppress(OSError):  # its end
                while os.read(terminal, 1000):
                    pass
            assert process.stderr is not None
            told = process.stderr.read().decode()
        os.close(terminal)
        assert process.returncode == 0, told
        assert text in talk.read_bytes()
    assert (tmp_path / "chat-history").read_text().splitlines()[0] == "the fox jumps"
    assert (tmp_path / "chat-history").stat().st_mode & 0o777 == 0o600


def test_thoughts_are_dim_on_a_terminal(
    tiny_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And left out where there is none: what is piped on is the answer."""
    llm = LLM(str(thinking_model(tiny_directory("llama"), tmp_path, "switch")), kv_bytes=4 << 20, threads=1)
    write(llm, "<think>hm, hm</think>So it is.")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for out, told in ((Terminal(), "hm, hm\n\nSo it is.\n"), (io.StringIO(), "So it is.\n")):
        monkeypatch.setattr("sys.stdin", io.StringIO("the fox?\n"))
        session = Session(Conversation(llm, max_tokens=90), out, interactive=False)
        session.run()
        assert out.getvalue().replace(DIM, "").replace(PLAIN, "") == told
        assert (DIM in out.getvalue(), PLAIN in out.getvalue()) == (out.isatty(), out.isatty())
        assert [(turn["thought"], turn["text"]) for turn in session.turns] == [("hm, hm", "So it is.")]


def test_a_chat_that_outgrows_the_context(run: Callable[..., Result], tiny: str) -> None:
    """It is told on stderr, and in the facts of the turn; without room it is refused if so wished."""
    options = ("chat", "-m", tiny, *OPTIONS, "--kv-bytes", 160 * 768, "--backend", "reference", "--json")
    lines = "the fox jumps over the lazy dog\n" * 6
    result = run(*options, stdin=lines)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    gone = [turn["left_out"]["messages"] for turn in facts["turns"]]
    assert sum(gone) > 0
    assert len(facts["messages"]) == 12 - sum(gone)
    assert result.stderr.count("the context is full: the ") == sum(count > 0 for count in gone)
    refused = run(*options, "--when-full", "refuse", stdin=lines)
    assert refused.exit_code == 1
    assert "shorten it" in refused.stderr
    wrong = run(*options, "--when-full", "forget", stdin="")
    assert "when_full must be one of refuse, drop, window" in wrong.stderr


def test_a_saved_conversation_goes_on(run_json: Callable[..., dict[str, Any]], tiny: str, tmp_path: Path) -> None:
    talk = tmp_path / "talk"
    whole = run_json("chat", "-m", tiny, *OPTIONS, stdin="the fox\njumps\n")
    run_json("chat", "-m", tiny, *OPTIONS, stdin=f"the fox\n/save {talk}\n")
    rest = run_json("chat", "-m", tiny, *OPTIONS, "--load", talk, stdin="jumps\n")
    assert rest["messages"] == whole["messages"]
    assert rest["turns"][0]["reused_tokens"] == whole["turns"][1]["reused_tokens"] > 0


def test_seeds_differ_by_turn_and_repeat_by_run(run_json: Callable[..., dict[str, Any]], tiny: str) -> None:
    options = ("chat", "-m", tiny, *OPTIONS, "--temperature", 1, "--seed", 7)
    one, two = (run_json(*options, stdin="the\n/reset\nthe\n")["turns"] for _ in range(2))
    assert [turn["text"] for turn in one] == [turn["text"] for turn in two]
    assert one[0]["text"] != one[1]["text"]


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (("--load", "{bad}"), "hi\n", "this is not a conversation saved"),
        ((), "/load {bad}\n", "this is not a conversation saved"),
        ((), "/load /no/such/file\n", "/no/such/file"),
        ((), "hi\n/save /proc/no/place\n", "cannot be saved"),
        (("--temperature", "-1"), "hi\n", "temperature"),
    ],
)
def test_bad_input_is_told_in_a_line(
    run: Callable[..., Result], tiny: str, tmp_path: Path, arguments: tuple[str, ...], stdin: str, message: str
) -> None:
    bad = tmp_path / "bad"
    bad.write_text("something else")
    arguments = tuple(argument.format(bad=bad) for argument in arguments)
    result = run("chat", "-m", tiny, *OPTIONS, *arguments, stdin=stdin.format(bad=bad))
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")


def test_ctrl_c_stops_a_reply_and_the_conversation_goes_on(tiny: str) -> None:
    command = [sys.executable, "-c", PAUSES + MAIN, "chat", "-m", tiny, "--threads", "1"]
    command += ["--max-tokens", "1900", "--json", "--ignore-eos"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=os.environ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"the quick brown fox\n/kv\n")
        process.stdin.flush()
        # The reply has begun (--json sends it to stderr), behind what PyTorch, and a slow machine, wait for.
        while process.stderr.read(8) in (b"loading ", b"PyTorch "):
            process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(b"/quit\n", timeout=PATIENCE_S)
    assert process.returncode == 0, err.decode()
    facts = json.loads(out.splitlines()[-1])
    turn = facts["turns"][0]
    assert turn["finish_reason"] == "interrupted"
    assert 1 <= turn["output_tokens"] < 1900
    assert facts["kv_entries"] == turn["entered_tokens"] + turn["output_tokens"]
    assert "stopped | " in err.decode()


@pytest.fixture
def opinionated(tiny: str, tmp_path: Path) -> str:
    """The tiny model, which states its own generation defaults."""
    directory = shutil.copytree(tiny, tmp_path / "opinionated")
    (directory / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 3}))
    return str(directory)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((), {"temperature": 0.25, "top_k": 3, "top_p": 1.0}),
        (("--temperature", 0), {"temperature": 0.0, "top_k": 3}),
        (("--top-k", 0, "--top-p", 0.5), {"temperature": 0.25, "top_k": 0, "top_p": 0.5}),
    ],
)
def test_a_models_own_defaults(
    given: tuple[Any, ...],
    expected: dict[str, float],
    opinionated: str,
    run: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They apply to parameters that are not given, and only in a chat: generate is greedy."""
    seen: list[SamplingParams] = []
    make = Request.__init__

    def watch(self: Request, program: Any, params: SamplingParams, *rest: Any) -> None:
        seen.append(params)
        make(self, program, params, *rest)

    monkeypatch.setattr(Request, "__init__", watch)
    assert run("chat", "-m", opinionated, *OPTIONS[:2], *given, stdin="the fox\n").exit_code == 0
    chosen = [params for params in seen if params.max_tokens == 8]
    assert [{name: getattr(params, name) for name in expected} for params in chosen] == [expected]
    seen.clear()
    assert run("generate", "-m", opinionated, "-p", "the fox", *OPTIONS[:2]).exit_code == 0
    assert [params.temperature for params in seen] == [0.0]


def test_defaults_of_a_model_that_states_none(run: Callable[..., Result], tiny: str) -> None:
    assert "temperature of 0.7 and a top-p of 0.9" in run("chat", "--help").stdout
    assert UNSTATED == {"temperature": 0.7, "top_p": 0.9}
    assert "greedily" in run("generate", "--help").stdout
    seeded = ("--max-tokens", 8, "--seed", 3)
    drawn = [
        run("chat", "-m", tiny, *seeded, *more, stdin="the fox\n").stdout
        for more in ((), ("--temperature", 0.7, "--top-p", 0.9), ("--temperature", 0))
    ]
    assert drawn[0] == drawn[1] != drawn[2]
