"""`twostroke chat`: a conversation whose KV cache is extended turn by turn, never recomputed."""

import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from twostroke.cli.chat_input import ChatInput, edited
from twostroke.cli.options import ChatSamplingOptions, JsonFlag, PositionalModelOptions, choice_settings, spread
from twostroke.cli.parsers import require_file
from twostroke.cli.report import AnswerWriter, cut_text, note, pace_text, print_json, size
from twostroke.errors import InvalidRequest, TwostrokeError
from twostroke.models.checkpoints.catalog import CATALOG

if TYPE_CHECKING:
    from twostroke.api.conversation import Conversation, Reply

UNSTATED = {"temperature": 0.7, "top_p": 0.9}  # of a model that states no generation defaults

HELP = """\
/retry        answer the last question again
/undo         take the last question and its answer back
/edit         write a question, or change the last one, in an editor ($EDITOR)
/save PATH    write messages and KV cache into a file
/load PATH    go on with a saved conversation
/reset        forget all but the system message
/system TEXT  set the system message (without TEXT: none)
/kv           facts about the KV cache
/help         this list
/quit         leave, as Ctrl-D does; Ctrl-C stops a reply
A question of several lines begins and ends with \"\"\"; what is pasted is one question."""


@spread
def chat(
    *,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    load: Annotated[Path | None, typer.Option(help="Go on with a conversation that was saved with /save.")] = None,
    when_full: Annotated[
        str,
        typer.Option(
            help="A turn that the context has no room for: drop the oldest turns, keep the KV of a window, or refuse.",
            **choice_settings(("drop", "window", "refuse")),
        ),
    ] = "drop",
    sinks: Annotated[int, typer.Option(help="First KV entries that a window keeps besides the last ones.")] = 4,
    as_json: JsonFlag = False,
    model_options: PositionalModelOptions,
    sampling: ChatSamplingOptions,
) -> None:
    """Talk with a model, line by line; /help lists commands. Lines may also be piped in.

    Replies are sampled with the model's own generation defaults where it states any (`twostroke models show`),
    else with a temperature of 0.7 and a top-p of 0.9.
    """
    from twostroke.api.conversation import Conversation, Overflow

    sampling.params()  # wrong ones are reported before the model is loaded
    overflow = Overflow(when_full, sinks)
    if load is not None:
        require_file(load)
    require_chat(model_options.model)
    with model_options.open() as llm:
        own = llm.generation or UNSTATED
        fields = own | sampling.fields()
        if load is None:
            conversation = Conversation(llm, system, overflow=overflow, **fields)
        else:
            conversation = Conversation.load(load, llm, overflow=overflow, **fields)
            conversation.system = conversation.system if system is None else system
        session = Session(conversation, sys.stderr if as_json else sys.stdout, sys.stdin.isatty())
        if session.interactive:
            how = ", ".join(f"{name} {fields[name]:g}" for name in own)
            note(f"{llm.name}: {how}; /help lists commands, Ctrl-D leaves")
        session.run()
        if as_json:
            print_json(session.facts())


def require_chat(model: str) -> None:
    """Raise InvalidRequest, before it is fetched, for a model of the catalog that has no chat template."""
    entry = CATALOG.get(model)
    if entry is not None and not entry.chat:
        raise InvalidRequest(f"{model} has no chat template: use generate, or another model (`twostroke models list`)")


class Session:
    """Lines in, replies out.

    Attributes:
        conversation: its messages and KV.
        out: where replies go.
        interactive: a person types; errors are then reported without ending the session.
        turns: facts of each reply.
    """

    def __init__(self, conversation: "Conversation", out: TextIO, interactive: bool) -> None:
        self.conversation, self.out, self.interactive = conversation, out, interactive
        self.turns: list[dict[str, Any]] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "save": self._save,
            "load": self._load,
            "reset": lambda _: self.conversation.reset(),
            "system": self._system,
            "kv": self._kv,
            "retry": lambda _: self._answer(self.conversation.undo()),
            "undo": self._undo,
            "edit": self._edit,
            "help": lambda _: self._print(HELP),
        }

    def run(self) -> None:
        """Read and answer lines until /quit or the end of the input."""
        # Its prompt is written to stdout, which --json reserves for JSON.
        for line in ChatInput(self.interactive, "> " if self.out is sys.stdout else ""):
            name, _, argument = line[1:].partition(" ")
            if line.startswith("/") and name in ("quit", "exit"):
                return
            try:
                if line.startswith("/"):
                    self._command(name, argument.strip())
                else:
                    self._answer(line)
            except TwostrokeError as error:
                if not self.interactive:
                    raise
                note(f"error: {error}")
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                note("interrupted")

    def facts(self) -> dict[str, Any]:
        """The whole run, for JSON."""
        from twostroke.engine.timings import DEFINITIONS

        kv = self.conversation.kv
        return {
            "model": self.conversation.llm.name,
            "messages": self.conversation.messages,
            "kv_entries": len(kv),
            "kv_bytes": kv.nbytes,
            "turns": self.turns,
            "definitions": DEFINITIONS,
        }

    def _answer(self, text: str) -> None:
        fields = {}
        if (seed := self.conversation.sampling.get("seed")) is not None:
            fields["seed"] = seed + len(self.turns)  # so that no turn repeats the random numbers of another
        reply = self.conversation.say(text, **fields)
        if reply.left_out:
            note(f"the context is full: {reply.left_out.text}")
        with _ctrl_c() as pressed:
            writer, thought, answer = AnswerWriter(self.out), 0, 0  # characters on the screen
            for _ in reply:
                writer.write(reply.thought[thought:], reply.text[answer:])
                thought, answer = len(reply.thought), len(reply.text)
                if pressed.is_set():
                    reply.close()
                    writer.write(reply.thought[thought:], reply.text[answer:])
                    break
        self._print("")
        self.turns.append(_turn(reply))
        note(_facts_line(reply, pressed.is_set()))
        if reply.finish_reason == "length":
            note(cut_text(len(reply.tokens), reply.max_tokens))

    def _command(self, name: str, argument: str) -> None:
        command = self._commands.get(name)
        if command is None:
            note(f"there is no command /{name}; /help lists them")
            return
        command(argument)

    def _save(self, path: str) -> None:
        if not path:
            note("/save needs a path")
            return
        self.conversation.save(Path(path).expanduser())
        note(f"saved {len(self.conversation.kv)} entries and {len(self.conversation.messages)} messages to {path}")

    def _load(self, path: str) -> None:
        if not path:
            note("/load needs a path")
            return
        old = self.conversation
        self.conversation = type(old).load(Path(path).expanduser(), old.llm, overflow=old.overflow, **old.sampling)
        for message in self.conversation.messages:
            note(f"{message['role']}: {message['content']}")

    def _undo(self, _: str) -> None:
        note(f"taken back: {self.conversation.undo()}")

    def _edit(self, _: str) -> None:
        questions = [one["content"] for one in self.conversation.messages if one["role"] == "user"]
        before = questions[-1] if questions else ""
        text = edited(before)
        if not text:
            note("nothing is asked: the text is empty")
            return
        if before:
            self.conversation.undo()
        self._answer(text)

    def _system(self, text: str) -> None:
        self.conversation.system = text or None

    def _kv(self, _: str) -> None:
        kv = self.conversation.kv
        positions = kv.positions
        span = f"positions {positions[0]} to {positions[-1]}" if positions else "no positions"
        pending = "" if kv.pending is None else f", token {kv.pending} pending"
        facts = f"{len(kv)} entries, {span}, {size(kv.nbytes)} ({kv.nbytes:,} bytes) in {kv.num_pages} pages{pending}"
        self._print(f"{facts}, fingerprint {kv.fingerprint}")

    def _print(self, text: str) -> None:
        self.out.write(text + "\n")
        self.out.flush()


@contextmanager
def _ctrl_c() -> Generator[threading.Event]:
    """The first Ctrl-C sets the event, so that a step is finished in order; the second one interrupts."""
    pressed = threading.Event()

    def press(*_: Any) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _turn(reply: "Reply") -> dict[str, Any]:
    from twostroke.engine.timings import Pace

    return {
        "text": reply.text,
        "thought": reply.thought,
        "token_ids": [token.id for token in reply.tokens],
        "finish_reason": reply.finish_reason or "interrupted",
        "entered_tokens": reply.entered,
        "reused_tokens": reply.reused,
        "recomputed_tokens": reply.recomputed,
        "left_out": asdict(reply.left_out),
        "output_tokens": len(reply.tokens),
        **Pace.of(reply.timings, reply.entered).as_dict(),
    }


def _facts_line(reply: "Reply", stopped: bool) -> str:
    from twostroke.engine.timings import Pace

    parts = ["stopped" if stopped and reply.finish_reason is None else ""]
    why = "turns were left out" if reply.left_out.messages else "history was rewritten"
    rewritten = f" ({reply.recomputed} dropped: {why})" if reply.recomputed else ""
    parts.append(f"{reply.entered} tokens entered, {reply.reused} entries reused{rewritten}")
    parts.append(f"{len(reply.tokens)} output tokens")
    parts.append(pace_text(Pace.of(reply.timings, reply.entered)))
    return " | ".join(part for part in parts if part)
