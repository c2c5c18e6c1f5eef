"""A front end's message becomes the request that the client meant, or is refused."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.cluster.messages import message
from twostroke.api.llm import LLM
from twostroke.cluster.dynamo_request import DynamoRequest, parse_request
from twostroke.cluster.interleaving import ChoiceInterleaver, deinterleave
from twostroke.cluster.migration import BROKEN, MigrationState, read_pointer
from twostroke.errors import InvalidRequest
from twostroke.methods import method
from twostroke.sampling.params import SamplingParams
from twostroke.server.grammar import Grammars

PROMPT = [5, 6, 7, 8]


@pytest.fixture
def ask(tiny_llm: Callable[..., LLM]) -> Callable[..., DynamoRequest]:
    llm = tiny_llm()
    grammars = Grammars(llm.tokenizer, llm.config.vocab_size)

    def call(tokens: list[int] = PROMPT, id: str = "r", generation: dict[str, float] | None = None, **stated: Any):
        return parse_request(message(tokens, **stated), id, generation or {}, grammars)

    return call


def test_every_option_arrives_as_the_client_wrote_it(ask: Callable[..., DynamoRequest]) -> None:
    def float32(value: float) -> float:
        return float(np.float32(value))

    asked = ask(
        temperature=float32(0.7), top_p=float32(0.9), top_k=40, min_p=float32(0.05), seed=3, n=2,
        presence_penalty=float32(0.3), frequency_penalty=float32(-0.1), repetition_penalty=float32(1.1),
        max_tokens=30, min_tokens=4, stop=["x", "yz"], stop_token_ids=[9], stop_token_ids_visible=[11],
        stop_token_ids_hidden=[1], logprobs=2,
        annotations=['twostroke:{"logit_bias": {"7": -2.5}, "method": {"name": "repeat", "times": 3}}'],
    )  # fmt: skip
    assert asked.params == SamplingParams(
        temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, seed=3, n=2, presence_penalty=0.3, frequency_penalty=-0.1,
        repetition_penalty=1.1, max_tokens=30, min_tokens=4, stop=("x", "yz"), stop_token_ids=(1, 9, 11), logprobs=2,
        logit_bias={7: -2.5},
    )  # fmt: skip
    assert asked.method == method("repeat", times=3)
    assert (asked.prompt, asked.given) == (PROMPT, [])


def test_what_is_not_stated_is_the_models_own_or_openais(ask: Callable[..., DynamoRequest]) -> None:
    asked = ask()
    assert asked.params == SamplingParams(temperature=1.0, max_tokens=None, seed=asked.params.seed)
    assert ask(generation={"temperature": 0.6, "top_k": 20}).params.temperature == 0.6
    assert ask(generation={"temperature": 0.6}, temperature=0.2).params.temperature == 0.2
    assert ask(top_k=-1).params.top_k == 0
    assert ask(ignore_eos=True, stop_token_ids_hidden=[1]).params.stop_token_ids == ()


def test_without_a_seed_every_worker_draws_the_same(ask: Callable[..., DynamoRequest]) -> None:
    assert ask(id="a").params == ask(id="a").params
    assert ask(id="a").params.seed != ask(id="b").params.seed


@pytest.mark.parametrize(
    "stated",
    [
        {"use_beam_search": True},
        {"best_of": 3},
        {"length_penalty": 0.5},
        {"include_stop_str_in_output": True},
        {"max_thinking_tokens": 5},
        {"prompt_logprobs": 1},
        {"skip_special_tokens": False},
        {"multi_modal_data": {"image_url": []}},
        {"guided_decoding": {"structural_tag": {}}},
        {"guided_decoding": {"regex": "a", "json": {}}},
        {"guided_decoding": {"json": "{"}},
        {"guided_decoding": {"json": "[" * 100_000}},
        {"guided_decoding": {"json": "null"}},
        {"guided_decoding": {"choice": []}},
        {"guided_decoding": {"choice": [5]}},
        {"guided_decoding": {"regex": 5}},
        {"annotations": ['twostroke:{"logit_bias": "abc"}']},
        {"annotations": ['twostroke:{"logit_bias": {"x": 1}}']},
        {"annotations": ['twostroke:{"guided_decoding": 5}']},
        {"annotations": ['twostroke:{"method": 5}']},
        {"annotations": ["twostroke:" + "[" * 100_000]},
        {"annotations": ["twostroke:{"]},
        {"annotations": ['twostroke:{"methods": "repeat"}']},
        {"annotations": ['twostroke:{"method": "repaet"}']},
        {"temperature": -1.0},
        {"migration_link": {"trace_id": "0" * 32, "span_id": "0" * 16}},
        {"migration_link": {"trace_id": "ab", "span_id": "no number"}},
    ],
    ids=lambda stated: json.dumps(stated)[:60],
)
def test_what_cannot_be_followed_is_refused(stated: dict[str, Any], ask: Callable[..., DynamoRequest]) -> None:
    with pytest.raises(InvalidRequest):
        ask(**stated)


@pytest.mark.parametrize("guided", [{"regex": "a+"}, {"choice": ["b", "cd"]}, {"json": {"type": "integer"}}])
def test_a_grammar_comes_by_the_field_or_by_the_annotation(
    guided: dict[str, Any], ask: Callable[..., DynamoRequest]
) -> None:
    masks = []
    for stated in (
        {"guided_decoding": guided | {"backend": None}},
        {"annotations": [f"twostroke:{json.dumps({'guided_decoding': guided})}"]},
    ):
        constraint = ask(**stated).params.constraint
        assert constraint is not None
        masks.append(constraint().mask())
    assert (masks[0] == masks[1]).all()
    assert 0 < masks[0].sum() < len(masks[0])


LINK = MigrationState(len(PROMPT), 10, 5, "89abcdef")


def test_a_retry_goes_on_where_the_answer_was(ask: Callable[..., DynamoRequest]) -> None:
    """Dynamo appends what was generated to the prompt, and lowers its counts."""
    asked = ask([*PROMPT, 20, 21, 22], max_tokens=7, min_tokens=2, migration_link=LINK.pointer(PROMPT))
    assert (asked.prompt, asked.given) == (PROMPT, [20, 21, 22])
    assert (asked.params.max_tokens, asked.params.min_tokens) == (10, 5)
    assert asked.identity == "89abcdef"
    assert asked.migration_pointer("89abcdef") == LINK.pointer(PROMPT)
    asked = ask(PROMPT, max_tokens=7, min_tokens=2, migration_link=LINK.pointer(PROMPT))
    assert (asked.params.max_tokens, asked.params.min_tokens) == (7, 2)
    assert asked.identity is None, "nothing is taken over"
    asked = ask([*PROMPT, 20], max_tokens=None, migration_link=MigrationState(len(PROMPT)).pointer(PROMPT))
    assert (asked.params.max_tokens, asked.params.min_tokens) == (None, 0)


def test_a_pointer_stands_for_its_prompt_alone() -> None:
    assert read_pointer(PROMPT, LINK.pointer(PROMPT)) == read_pointer([*PROMPT, 9, 9], LINK.pointer(PROMPT)) == LINK
    assert read_pointer(PROMPT, None) is None
    for other in ([5, 6, 7, 9, 9], PROMPT[:3]):
        with pytest.raises(InvalidRequest):
            read_pointer(other, LINK.pointer(PROMPT))
    with pytest.raises(InvalidRequest):
        read_pointer(PROMPT, BROKEN)


def test_the_number_of_choices_may_be_stated_once(ask: Callable[..., DynamoRequest]) -> None:
    assert ask(annotations=['twostroke:{"n": 3}']).params.n == 3
    with pytest.raises(InvalidRequest):
        ask(n=2, annotations=['twostroke:{"n": 3}'])


def test_tokens_of_several_choices_can_be_taken_apart(tiny_llm: Callable[..., LLM]) -> None:
    """In whichever order they are made, and after any number of them."""
    llm = tiny_llm()
    stated: dict[str, Any] = {"n": 3, "max_tokens": 12, "temperature": 1.0, "seed": 3, "stop": ("a", "e")}
    params, [whole] = SamplingParams(**stated), llm.generate([[5, 6, 7]], **stated)
    choices = [output.tokens for output in whole.outputs]
    assert len({len(choice) for choice in choices}) > 1, "they end at different places"
    orders = (
        [token for choice in choices for token in choice],
        [token for choice in reversed(choices) for token in choice],
    )
    sent = []
    for order in orders:
        interleaver = ChoiceInterleaver(3)
        sent.append([token for made in order for token in interleaver.push(made)])
        assert not interleaver.left
    assert sent[0] == sent[1]
    for cut in range(len(sent[0]) + 1):
        answers, interleaver = deinterleave([token.id for token in sent[0][:cut]], params, llm.tokenizer)
        assert sum(map(len, answers)) == cut
        for answer, choice in zip(answers, choices, strict=True):
            assert answer == [token.id for token in choice[: len(answer)]]
        rest = [
            token for made in orders[0] if made.index >= len(answers[made.choice]) for token in interleaver.push(made)
        ]
        assert rest == sent[0][cut:]
    with pytest.raises(InvalidRequest):
        deinterleave([token.id for token in (*sent[0], sent[0][0])], params, llm.tokenizer)
