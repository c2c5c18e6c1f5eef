"""Thoughts: which form a model has, how they are set apart, and what ends them."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.thinking import TEMPLATES, Preferring, thinking_model, write
from twostroke.api.conversation import Conversation
from twostroke.api.llm import LLM
from twostroke.api.reasoning.forms import FORMS, form_name
from twostroke.api.reasoning.reader import HarmonyReader, MarkedReader, Phase, ReasoningReader
from twostroke.api.reasoning.reasoning import Reasoning
from twostroke.engine.output import ChoiceOutput
from twostroke.engine.request import Request
from twostroke.models.checkpoints.checkpoint import HfTokenizerSource
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.sampling.answer_reader import PlainText, ThoughtText
from twostroke.sampling.constraint import ConstraintFactory
from twostroke.sampling.draw import Sampled
from twostroke.sampling.params import SamplingParams
from twostroke.server import grammar
from twostroke.server.grammar import Grammars
from twostroke.server.tools.parser import parser_factory

VOCAB = 384
THINK, HARMONY = FORMS["think"], FORMS["harmony"]
TEXTS = st.text(st.sampled_from("ab <>/[]{}|\n\"'thinkÜ"), max_size=20)
CUTS = st.lists(st.integers(0, 200), max_size=30)


@pytest.fixture(scope="module")
def tokenizer_of(
    tiny_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Tokenizer]:
    made: dict[str, Tokenizer] = {}

    def tokenizer(kind: str) -> Tokenizer:
        if kind not in made:
            directory = thinking_model(tiny_directory("llama"), tmp_path_factory.mktemp(kind), kind)
            made[kind] = Tokenizer.from_source(HfTokenizerSource(directory))
        return made[kind]

    return tokenizer


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)] or [""]


def read(reader: ReasoningReader, parts: Sequence[str]) -> tuple[str, str]:
    """The thought and the answer of a text that comes in parts."""
    spans = [span for part in parts for span in reader.spans(part)]
    spans += reader.spans("", ended=True)
    assert "".join(span.written for span in spans) == "".join(parts)
    pieces = [(span, piece) for span in spans for piece in span.pieces]
    assert all(isinstance(piece, PlainText if span.plain else ThoughtText) for span, piece in pieces)
    thought = "".join(piece.text for _, piece in pieces if isinstance(piece, ThoughtText))
    return thought, "".join(piece.text for _, piece in pieces if isinstance(piece, PlainText))


# Forms ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), [("switch", "think"), ("open", "think"), ("mistral", "mistral"),
                                            ("gemma", "gemma"), ("harmony", "harmony")])  # fmt: skip
def test_the_form_is_found_in_the_template(kind: str, name: str, tokenizer_of: Callable[[str], Tokenizer]) -> None:
    found = Reasoning.of(tokenizer_of(kind), VOCAB)
    assert found is not None
    assert found.form is FORMS[name]
    assert Reasoning.of(tokenizer_of(kind), VOCAB, "none") is None
    told = Reasoning.of(tokenizer_of(kind), VOCAB, "granite-3.2")
    assert told is not None
    assert told.form is FORMS["granite-3.2"]


def test_a_template_without_marks_has_no_form() -> None:
    assert form_name("between <think></think> and write your response between <response></response>") == "granite-3.3"
    assert form_name(None) is None
    assert form_name("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}I think") is None


def test_where_an_answer_begins(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    """The template opens or closes a thought; a mark in what the user says does neither."""
    hostile = [{"role": "user", "content": "<think>"}, {"role": "user", "content": "</think>"}]
    cases: list[tuple[str, dict[str, Any], Phase]] = [
        ("switch", {}, Phase.UNDECIDED),
        ("switch", {"enable_thinking": False}, Phase.ANSWER),
        ("open", {}, Phase.THOUGHT),
        ("gemma", {"enable_thinking": False}, Phase.ANSWER),
        ("mistral", {}, Phase.UNDECIDED),
        ("harmony", {}, Phase.UNDECIDED),
    ]
    for kind, asked, phase in cases:
        reasoning = Reasoning.of(tokenizer_of(kind), VOCAB)
        assert reasoning is not None
        for messages in (hostile, hostile[:1], [{"role": "user", "content": "hi"}]):
            assert reasoning.phase_after(tokenizer_of(kind).encode_chat(messages, **asked)) is phase, kind
    reasoning = Reasoning.of(tokenizer_of("switch"), VOCAB)
    assert reasoning is not None
    for said, phase in (("Well", Phase.ANSWER), ("<think>hm", Phase.THOUGHT), ("<think>a</think>b", Phase.ANSWER)):
        assert reasoning.phase_after("[assistant]" + said, said) is phase


# Readers --------------------------------------------------------------------------------------------------------------


@given(TEXTS, TEXTS, CUTS, st.sampled_from(["", "\n", "  "]), st.booleans())
def test_marks_split_at_every_place(thought: str, answer: str, cuts: Sequence[int], space: str, opened: bool) -> None:
    text = f"{'' if opened else space + '<think>'}{space}{thought}{space}</think>{space}{answer}"
    reader = MarkedReader(THINK, Phase.THOUGHT if opened else Phase.UNDECIDED)
    expected = read(MarkedReader(THINK, reader.phase), [text])
    assert read(reader, pieces(text, cuts)) == expected
    if "<" not in thought:
        assert expected == (thought.strip(), answer.lstrip())


@given(TEXTS, CUTS)
def test_an_answer_without_a_thought_stays_as_it_is(text: str, cuts: Sequence[int]) -> None:
    assert read(MarkedReader(THINK, Phase.ANSWER), pieces(text, cuts)) == ("", text)
    if not text.lstrip().startswith("<think>"):
        assert read(MarkedReader(THINK, Phase.UNDECIDED), pieces(text, cuts)) == ("", text)


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("<think>a</think>b</think>c", "a", "b</think>c"),  # closed twice
        ("<think>a<think>b</think>c", "a<think>b", "c"),
        ("<think><think>a</think>c", "a", "c"),  # opened twice
        ("<think>\n\n</think>\n\nc", "", "c"),
        ("<think>never closed </thi", "never closed", ""),
        ('{"a": "<think>x</think>"}', "", '{"a": "<think>x</think>"}'),
        ('<think>x</think>{"a": "</think>"}', "x", '{"a": "</think>"}'),
        ("a </think> b", "", "a </think> b"),
        ("", "", ""),
    ],
)
def test_hostile_texts(text: str, thought: str, answer: str) -> None:
    for size in range(1, len(text) + 2):
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        assert read(MarkedReader(THINK, Phase.UNDECIDED), parts) == (thought, answer)


@given(TEXTS, CUTS, st.sampled_from(["", "\n"]))
def test_marks_around_an_answer(answer: str, cuts: Sequence[int], space: str) -> None:
    """Granite 3.3 writes its answer between marks, if it has thought."""
    text = f"<think>hm</think>{space}<response>{answer}</response>{space}"
    assert read(MarkedReader(FORMS["granite-3.3"], Phase.UNDECIDED), pieces(text, cuts)) == ("hm", answer.lstrip())
    for plain in (f"x{answer}</response> x", f"x {answer}<response>"):
        assert read(MarkedReader(FORMS["granite-3.3"], Phase.UNDECIDED), pieces(plain, cuts)) == ("", plain)
        thought = read(MarkedReader(FORMS["granite-3.3"], Phase.THOUGHT), pieces(f"hm</think>{plain}", cuts))
        assert thought == ("hm", plain)


A, F, C = (f"<|channel|>{name}<|message|>" for name in ("analysis", "final", "commentary"))
NEXT = "<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'


@given(st.text("ab <|\n", max_size=10), st.text("ab <|\n", max_size=10), CUTS)
def test_channels_split_at_every_place(thought: str, answer: str, cuts: Sequence[int]) -> None:
    text = f"{A}{thought}{NEXT}{F}{answer}"
    assert read(HarmonyReader(Phase.UNDECIDED), pieces(text, cuts)) == (thought, answer)


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        (f"{A}a{NEXT}{C}b{NEXT}{A}c{NEXT}{F}d", "a\n\nc", "bd"),
        (f"{F}d", "", "d"),
        (f"{A}never closed", "never closed", ""),
        (f"{A}a<|end|><|start|>assis", "a", ""),
        (f"{A}a{NEXT}{CALL}", "a", '{"a": 1}'),  # nobody reads calls, so the arguments are the answer
        ("plain", "", "plain"),
    ],
)
def test_messages_of_a_turn(text: str, thought: str, answer: str) -> None:
    for size in (1, 3, 200):
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        assert read(HarmonyReader(Phase.UNDECIDED), parts) == (thought, answer)


@pytest.mark.parametrize("size", [1, 3, 200])
def test_nothing_is_told_out_of_order(size: int, tokenizer_of: Callable[[str], Tokenizer]) -> None:
    """Where the answer's reader holds text back, it is told before what comes behind the message."""
    tools = parser_factory(tokenizer_of("harmony"), [{"name": "f"}])
    text = f"{A}a{NEXT}{C}I look <tool{NEXT}{CALL}"
    reader = HarmonyReader(Phase.UNDECIDED, tools())
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    spans = [span for part in parts for span in reader.spans(part)]
    spans += reader.spans("", ended=True)
    assert "".join(span.written for span in spans) == text


# Grammars and budgets -------------------------------------------------------------------------------------------------


def written(
    tokenizer: Tokenizer, text: str, *, rule: str | None = None, budget: int | None = None, max_tokens: int = 300,
    phase: Phase | None = None, **fields: object,
) -> tuple[str, list[int]]:  # fmt: skip
    """What a model that wants to write `text` writes, raw, and its tokens."""
    reasoning = Reasoning.of(tokenizer, VOCAB)
    assert reasoning is not None
    begins = reasoning.phase_after(tokenizer.encode_chat([{"role": "user", "content": "hi"}]))
    constraint = None if rule is None else Grammars(tokenizer, VOCAB).compile(rule)
    params = SamplingParams(max_tokens=max_tokens, constraint=constraint, **fields)  # pyright: ignore[reportArgumentType]
    params = reasoning.applied(params, phase or begins, budget=budget)
    ids = [*tokenizer.encode(text, add_bos=False), *tokenizer.encode("</s>", add_bos=False)]
    within: ConstraintFactory | None = params.constraint
    wants = Preferring(ids, VOCAB, within)
    output, told = ChoiceOutput(params, tokenizer, 0), ""
    while output.finish_reason is None:
        mask = wants.mask()
        token = int(mask.argmax())
        assert mask[token], "nothing is allowed"
        wants.advance(token)
        told += output.push(Sampled(token)).text
    return told, output.ids


@pytest.mark.parametrize("kind", ["switch", "open"])
def test_a_grammar_begins_behind_the_thought(kind: str, tokenizer_of: Callable[[str], Tokenizer]) -> None:
    opener = "<think>\n" if kind == "switch" else ""
    rule = grammar.json_schema({"enum": [{"a": "</think>"}]}).text
    thought = 'hm {"a": 1} <b>'
    for space in ("", "\n\n"):
        wanted = f'{opener}{thought}\n</think>{space}{{"a": "</think>"}}'
        assert written(tokenizer_of(kind), wanted, rule=rule)[0] == wanted
    refused = f"{opener}{thought}\n</think>No JSON"
    told, _ = written(tokenizer_of(kind), refused, rule=rule)
    assert told.startswith(f"{opener}{thought}\n</think>")
    assert json.loads(told.split("</think>", 1)[1]) == {"a": "</think>"}


def test_a_mark_before_an_answer_is_whole_or_not_there(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_of("switch")
    reasoning = Reasoning("granite-3.3", tokenizer, VOCAB)
    rule = Grammars(tokenizer, VOCAB).compile(grammar.choice(["7"]))
    params = reasoning.applied(SamplingParams(constraint=rule), Phase.UNDECIDED)
    for text, expected in (("<response>7", "<response>7"), ("7", "7"), ("<7", "<response>7")):
        assert params.constraint is not None
        wants = Preferring(tokenizer.encode(f"<think>a</think>{text}", add_bos=False), VOCAB, params.constraint)
        told = ""
        while not wants.finished:
            token = int(wants.mask().argmax())
            wants.advance(token)
            told += tokenizer.decode([token], skip_special=False)
        assert told == f"<think>a</think>{expected}"


def test_a_grammar_without_a_thought(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    """Where no thought is opened, the grammar holds from the first token; also if it allows the beginning of one."""
    tokenizer = tokenizer_of("switch")
    assert written(tokenizer, "ab", rule=grammar.regex("[ab]+c"))[0].startswith("ab")
    for text in ("<b>", "<thin", "<think", "x", "<think>a</think>ok"):
        rule = grammar.choice(["<b>", "<thin", "<think", "x", "ok"])
        assert written(tokenizer, text, rule=rule)[0] == text
    told, _ = written(tokenizer, "<thx", rule=grammar.choice(["<b>", "x"]))
    assert told.startswith("<think>"), "what begins like a thought and is not in the grammar is one"
    closed, _ = written(tokenizer, "<think>a</think>x", rule=grammar.choice(["<b>", "x"]), phase=Phase.ANSWER)
    assert closed in ("<b>", "x"), "where thoughts are off, none begins"


def test_an_end_mark_takes_nothing_of_the_answer_along(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    """A token that has the last character of a mark and more is not sampled: the grammar would miss its end."""
    tokenizer = tokenizer_of("open")
    reasoning = Reasoning.of(tokenizer, VOCAB)
    assert reasoning is not None
    tokens = reasoning._tokens  # pyright: ignore[reportPrivateUsage]
    vars(tokens)["_ends"] = [(7, ">{"), (8, ">\n\n"), (9, ">"), (10, "x</think>{")]
    assert [bool(tokens.within("</think")[id]) for id in (7, 8, 9, 10)] == [False, True, True, False]
    assert [bool(tokens.within("hm")[id]) for id in (7, 8, 9, 10)] == [True, True, True, False]
    assert not tokens.within("")[list(tokenizer.eos_ids)].any()


def test_white_space_of_an_end_mark_counts(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    """An empty line may follow a thought, and no more: a part of it may have come with the mark."""
    for space in ("\n", "\n\n"):
        assert (
            written(tokenizer_of("merged"), f"hm</think>{space}ok", rule=grammar.choice(["ok"]))[0]
            == f"hm</think>{space}ok"
        )
    assert written(tokenizer_of("merged"), "hm</think>\n\n\nok", rule=grammar.choice(["ok"]))[0] == "hm</think>\n\nok"


def test_a_grammar_is_not_left_out(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    """An answer does not end in its thought, as long as a grammar waits behind it."""
    tokenizer = tokenizer_of("open")
    _, ids = written(tokenizer, "hm", rule=grammar.choice(["ok"]), max_tokens=9)
    assert len(ids) == 9
    assert not tokenizer.eos_ids & set(ids)
    assert written(tokenizer, "hm", max_tokens=9)[0] == "hm", "without a grammar it may"


@pytest.mark.parametrize("kind", ["switch", "open", "mistral", "gemma"])
@pytest.mark.parametrize("budget", [0, 1, 3, 100])
def test_a_budget_closes_the_thought(kind: str, budget: int, tokenizer_of: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_of(kind)
    reasoning = Reasoning.of(tokenizer, VOCAB)
    assert reasoning is not None
    form = reasoning.form
    opener, thought = "" if kind == "open" else form.opener.rstrip(), "thequickfox"
    told, ids = written(tokenizer, f"{opener}{thought}{form.closer}yes", budget=budget, max_tokens=80)
    head, _, rest = told.removeprefix(opener).partition(form.closer)
    size = len(tokenizer.encode(thought, add_bos=False))
    if budget >= size:
        assert (head, rest) == (thought, "yes")
    else:
        kept = tokenizer.decode(tokenizer.encode(thought, add_bos=False)[:budget])
        assert head == kept + form.before
        assert rest.startswith(form.after + thought[len(kept) :]), "what the model goes on to say is the answer"
    assert len(ids) <= 80


def test_a_budget_and_a_grammar(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    rule = grammar.choice(["yes", "no"])
    for kind, text, expected in (
        ("open", "on and on and on", "on\n</think>\n\nno"),
        ("open", "</</</</", "</think>\n\nno"),  # a part of the mark is completed
        ("harmony", f"{A}on and on{NEXT}", f"{A}on{NEXT}{F}no"),
        ("harmony", f"{A}o{NEXT}{F}yes", f"{A}o{NEXT}{F}yes"),
        ("harmony", f"{F}yes", f"{F}yes"),
        ("harmony", "yes", f"{F}yes"),
    ):
        told, _ = written(tokenizer_of(kind), text, rule=rule, budget=2)
        assert told in (expected, expected.replace("no", "yes")), (kind, text)


def test_stop_strings_do_not_reach_into_a_thought(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    text = "<think>a\n\nSTOP</think>\n\nb STOP c"
    told, _ = written(tokenizer_of("switch"), text, stop=("STOP", "\n\n"))
    assert told == "<think>a\n\nSTOP</think>\n\nb "


def test_nothing_else_changes_the_tokens(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    """A thought that nobody limits is read, and its tokens are sampled as ever."""
    for kind in TEMPLATES:
        tokenizer = tokenizer_of(kind)
        reasoning = Reasoning.of(tokenizer, VOCAB)
        assert reasoning is not None
        for phase in Phase:
            params = SamplingParams(max_tokens=5)
            assert reasoning.applied(params, phase).constraint is None


# In Python ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tiny_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory = thinking_model(tiny_directory("llama"), tmp_path_factory.mktemp("llm"), "mistral")
    return LLM(str(directory), kv_bytes=4 << 20, threads=1)


def test_a_completion_has_its_thought(llm: LLM) -> None:
    end = write(llm, "[THINK]hm STOP[/THINK]So STOP it is.")
    made = llm.chat("hi", stop=("STOP",), max_tokens=90)
    plain = llm.generate([llm.chat_prompt("hi")], max_tokens=90)[0]
    end()
    assert (made.thought, made.text, made.finish_reason) == ("hm STOP", "So ", "stop")
    assert (plain.thought, plain.text) == ("", "hm STOPSo STOP it is."), "a prompt is answered as it was"


def test_replies_have_their_thoughts(llm: LLM, tmp_path: Path) -> None:
    conversation = Conversation(llm, max_tokens=90)
    end = write(llm, "[THINK]hm, hm[/THINK]So.")
    reply = conversation.say("the fox?")
    told = [(reply.thought, reply.text) for _ in reply]
    assert all(after[0].startswith(before[0]) for before, after in itertools.pairwise(told))
    assert told[-1] == ("hm, hm", "So.")
    said = {"role": "assistant", "content": "So.", "reasoning_content": "hm, hm"}
    assert conversation.messages[-1] == said
    conversation.save(tmp_path / "talk")
    assert Conversation.load(tmp_path / "talk", llm).messages == conversation.messages
    whole, thought = len(reply.tokens), len(llm.tokenizer.encode("[THINK]hm", add_bos=False))
    assert conversation.fork(at=whole - 1).messages[-1] == said
    assert conversation.fork(at=thought).messages[-1] == {"role": "assistant", "content": "", "reasoning_content": "hm"}
    again = conversation.say("and?")
    assert "hm" not in again.prompt, "the template drops the thoughts of earlier turns"
    next(again)
    again.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": ""}
    end()


def test_preempted_and_together_budgets_give_the_same(
    llm: LLM, tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    """A budget and a grammar depend on the choice's own tokens alone."""
    tight = LLM(str(thinking_model(tiny_directory("llama"), tmp_path, "mistral")), kv_bytes=14 * 16 * 768, threads=1)

    def requests(one: LLM) -> list[Request]:
        assert one.reasoning is not None
        rule = Grammars(one.tokenizer, VOCAB).compile(grammar.regex("[a-z ]{30}"))
        params = SamplingParams(max_tokens=70, constraint=rule, temperature=1.0)
        made: list[Request] = []
        for seed in range(6):
            prompt = one.tokenizer.encode_chat([{"role": "user", "content": f"the fox {seed}"}])
            own = dataclasses.replace(params, seed=seed)
            made.append(one.request(prompt, one.reasoning.applied(own, Phase.THOUGHT, budget=20 + seed)))
        return made

    alone: list[list[int]] = []
    for request in requests(llm):
        llm.engine.run([request])
        alone.append(request.choices[0].output.ids)
    together = requests(tight)
    tight.engine.run(together)
    assert tight.engine.preemptions > 0
    assert [request.choices[0].output.ids for request in together] == alone
    for number, ids in enumerate(alone):
        thought, answer = tight.tokenizer.decode(ids, skip_special=False).split("[/THINK]", 1)
        assert len(tight.tokenizer.encode("[/THINK]", add_bos=False)) == 1
        assert len(answer) == 30, (number, thought)


@pytest.mark.models
def test_a_real_vocabulary_writes_marks_in_several_tokens() -> None:
    """The 135M was not trained to think; a budget closes what it writes, and a grammar has the answer."""
    llm = LLM("smollm2-135m", kv_bytes=64 << 20, threads=1)
    reasoning = Reasoning("think", llm.tokenizer, llm.config.vocab_size)
    asked = llm.tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    prompt = [*asked, *llm.tokenizer.encode("<think>\n", add_bos=False)]
    phase = reasoning.phase_after(prompt)
    rule = Grammars(llm.tokenizer, llm.config.vocab_size).compile(grammar.regex(r"(Paris|London|Rome)\."))
    params = SamplingParams(max_tokens=80, constraint=rule)
    made = llm.generate([prompt], reasoning.applied(params, phase, budget=24))[0]
    assert (phase, made.text, made.finish_reason) == (Phase.THOUGHT, "Paris.", "stop")
    assert len(llm.tokenizer.encode(made.thought, add_bos=False)) in (23, 24)
    plain = SamplingParams(max_tokens=60)
    free = llm.generate([prompt], reasoning.applied(plain, phase, budget=10**6))[0]
    assert [token.id for token in free.tokens] == [token.id for token in llm.generate([prompt], plain)[0].tokens]
