"""Several models in one engine: students share the pool, drafts need not, and mismatches are refused with names."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.engine.output import Token
from twostroke.engine.request import Request
from twostroke.engine.strokes import Decode, Decoded, Prefill, Program
from twostroke.errors import GeometryMismatch, InvalidRequest
from twostroke.sampling.draw import Sampled
from twostroke.sampling.params import SamplingParams

TinyLLM = Callable[..., LLM]
PROMPT = [5, 9, 17, 33, 65, 129, 200, 11, 4, 7, 250, 3, 90, 21, 8, 77, 41, 30, 12]


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the tiny Llama's tokenizer, with fewer layers."""
    return write_model("llama", tmp_path_factory.mktemp("smaller"), seed=1, num_hidden_layers=1)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the tiny Llama's geometry, with another width."""
    return write_model("llama", tmp_path_factory.mktemp("twin"), seed=2, hidden_size=32, head_dim=16)


@pytest.mark.reference
def test_a_student_shares_the_pool_and_nothing_else(tiny_llm: TinyLLM, twin: Path) -> None:
    llm = tiny_llm(student=str(twin))
    teacher, student = llm.engine.models["main"], llm.engine.models["student"]
    assert student.pool is teacher.pool
    assert student.id != teacher.id
    assert student.index is not None
    alone = LLM(str(twin), threads=1, kv_bytes=16 << 20)
    mine = llm.prefill(PROMPT, model="student")
    assert (mine.entries() == alone.prefill(PROMPT).entries()).all()
    assert mine.canonical_length(student.id) == len(PROMPT)
    assert mine.canonical_length(teacher.id) == 0
    kv = llm.prefill(PROMPT)
    made = llm.decode(kv, model="student", max_tokens=4, ignore_eos=True)
    tokens = [token.id for token in made]
    assert tokens[0] == next(llm.decode(kv, max_tokens=1, ignore_eos=True)).id  # the value has the teacher's logits
    assert made.kv[: len(kv)].canonical_length(teacher.id) == len(kv)
    assert made.kv.canonical_length(teacher.id) == made.kv.canonical_length(student.id) + len(kv) == len(kv)


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4", "int3", "int2"])
def test_a_student_may_be_the_model_re_encoded(weights: str, tiny_llm: TinyLLM) -> None:
    llm, alone = tiny_llm(student=weights), tiny_llm(weights=weights)
    mine, same = llm.prefill(PROMPT, model="student"), alone.prefill(PROMPT)
    assert (mine.entries() == same.entries()).all()
    assert mine.canonical_length(alone.model.id) == len(PROMPT)


@pytest.mark.reference
def test_names_of_companions(tiny_llm: TinyLLM, twin: Path) -> None:
    named = tiny_llm(student=f"{twin}@int8").engine.models["student"]
    assert named.id == LLM(str(twin), weights="int8", kv_bytes=1 << 20).model.id
    itself = tiny_llm(student="stored", draft="@stored")
    assert set(map(id, itself.engine.models.values())) == {id(itself.model)}  # the same weights are loaded once
    assert set(itself.engine.models) == {"main", "student", "draft"}


def test_a_draft_of_other_geometry_has_a_pool_of_its_own(tiny_llm: TinyLLM, smaller: Path) -> None:
    llm = tiny_llm(draft=str(smaller))
    draft = llm.engine.models["draft"]
    assert draft.pool is not llm.pool
    assert draft.pool.num_pages == llm.pool.num_pages
    with pytest.raises(GeometryMismatch, match=r"groups \[3 layers .*\] is not \[1 layers"):
        llm.prefill(PROMPT, after=llm.prefill(PROMPT), model="draft")


def test_what_does_not_fit_is_named(tiny_llm: TinyLLM, smaller: Path, tmp_path: Path) -> None:
    with pytest.raises(GeometryMismatch, match=r"cannot be the student of .*: .*\[1 layers .*\] is not \[3 layers"):
        tiny_llm(student=str(smaller))
    with pytest.raises(InvalidRequest, match="there is no model 'student' in this engine; it has main"):
        tiny_llm().prefill(PROMPT, model="student")
    other = write_model("llama", tmp_path)
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text().replace('"<s>"', '"<S>"'))
    with pytest.raises(GeometryMismatch, match="tokenizer"):
        tiny_llm(draft=str(other))


def guessing(llm: LLM, guesses: list[int], logprobs: int | None = None) -> Request:
    """A student continues the teacher's value with guesses: its first row is the teacher's, the others its own."""

    def program() -> Program:
        kv = yield Prefill(PROMPT)
        run: Decoded = yield Decode(kv, model="student", guesses=guesses)
        yield Decode(run.kv, model="student")
        return run.tokens

    params = SamplingParams(max_tokens=8, ignore_eos=True, seed=1, logprobs=logprobs)
    return Request(program, params, llm.tokenizer)


def test_draws_of_two_models_come_in_order(tiny_llm: TinyLLM, twin: Path) -> None:
    """Beside a lane that decodes with the student alone, which would be drawn for first."""
    llm = tiny_llm(student=str(twin), prefix_index="off")
    kv = llm.prefill(PROMPT)
    made = [token.id for token in llm.decode(kv, model="student", max_tokens=4, ignore_eos=True)]
    alone, beside = guessing(llm, made[:3]), guessing(llm, made[:3])
    llm.engine.finish([llm.engine.submit(alone)])
    assert alone.result == made
    older = llm.decode(llm.prefill(PROMPT[:7], model="student"), model="student", max_tokens=30, ignore_eos=True)
    next(older)
    llm.engine.finish([llm.engine.submit(beside)])
    assert beside.result == made
    assert [token.id for token in beside.events] == [token.id for token in alone.events]
    older.close()


@pytest.mark.parametrize("seen", range(5))
def test_a_preemption_among_guesses_changes_nothing(seen: int, tiny_llm: TinyLLM, twin: Path) -> None:
    """A stroke that comes back after some of its guesses stood goes on with the others, and ends where it ended."""
    llm = tiny_llm(student=str(twin), prefix_index="off")
    made = [t.id for t in llm.decode(llm.prefill(PROMPT), model="student", max_tokens=5, ignore_eos=True)]
    guesses = [*made[:3], (made[3] + 1) % llm.config.vocab_size]
    # With log-probabilities rows are sampled one by one, so it can be between any two of them.
    undisturbed, request = (guessing(llm, guesses, logprobs=0) for _ in range(2))
    llm.engine.finish([llm.engine.submit(undisturbed)])
    assert undisturbed.result == made[:4]
    (choice,), taken = request.choices, 0
    advance = choice.output.push

    def push(sampled: Sampled, full: bool = False) -> Token:
        nonlocal taken
        taken += 1
        return advance(sampled, full)

    choice.output.push = push  # type: ignore[method-assign]
    llm.engine.submit(request)
    resume = llm.engine.requests.resume_programs

    def preempting() -> None:
        if taken == seen + 1 and not request.preemptions:
            llm.engine.placement.preempt(choice)
        resume()

    llm.engine.requests.resume_programs = preempting  # type: ignore[method-assign]
    llm.engine.finish([request])
    assert request.preemptions == 1
    assert request.result == undisturbed.result
    assert [token.id for token in request.events] == [token.id for token in undisturbed.events]
