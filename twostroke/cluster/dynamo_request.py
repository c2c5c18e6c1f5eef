"""What Dynamo's front end asks for, as a request of the engine.

A field that changes the answer is followed or refused; none is passed over. The front end keeps some fields to itself
(`logit_bias`), and refuses those that it does not know (`method`). What it cannot say goes along in an annotation,
which it hands on as it is: `"nvext": {"annotations": ["twostroke:{...}"]}`, with a JSON object of `RequestAnnotation`.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from twostroke.api.llm import LLM
from twostroke.cluster.interleaving import ChoiceInterleaver, deinterleave
from twostroke.cluster.migration import MigrationState, read_pointer
from twostroke.engine.request import Request
from twostroke.errors import InvalidRequest
from twostroke.fields import Rule
from twostroke.methods import Method, method
from twostroke.sampling.constraint import ConstraintFactory
from twostroke.sampling.params import SamplingParams
from twostroke.server import grammar
from twostroke.server.grammar import Grammar, Grammars

MARK = "twostroke:"  # before the JSON object of an annotation
TEMPERATURE = 1.0  # OpenAI's, where neither the client nor the model states one

# By group: fields that are read, and those that say nothing about the tokens, or only to other engines.
FOLLOWED = {
    "sampling_options": {
        "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
        "seed", "guided_decoding",
    },
    "stop_conditions": {
        "max_tokens", "min_tokens", "stop", "stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden",
        "ignore_eos",
    },
    "output_options": {"logprobs"},
}  # fmt: skip
NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {  # further fields, with the values that ask for nothing
    "sampling_options": {
        "best_of": (1,),
        "use_beam_search": (False,),
        "length_penalty": (1.0,),
        "include_stop_str_in_output": (False,),
    },
    "output_options": {"skip_special_tokens": (True,), "formatted_prompt": (True, False)},
}
NEUTRAL["output_options"]["return_tokens_as_token_ids"] = (True, False)  # the front end's own
UNSUPPORTED = ("prompt_embeds", "multi_modal_data", "encoder_result")
GUIDED = {  # what each of them must be
    "json": (lambda value: isinstance(value, dict), "a schema, as a JSON object"),
    "regex": (lambda value: isinstance(value, str), "a text"),
    "choice": (Rule(tuple, each=Rule(str), test=bool).accepts, "a list of texts"),
    "grammar": (lambda value: isinstance(value, str), "a text"),
}


@dataclass(frozen=True)
class RequestAnnotation:
    """What a client says in the annotation."""

    method: str | Mapping[str, Any] = "plain"  # a technique: its name, or an object with its name and parameters
    # as in Dynamo's requests: one of json (a schema), regex, choice, grammar. Given here, it leaves migration on, which
    # Dynamo turns off for requests with its own field.
    guided_decoding: Mapping[str, Any] = field(default_factory=dict)
    logit_bias: Mapping[str, float] = field(default_factory=dict)  # as OpenAI's
    # number of choices. As with a grammar, Dynamo turns migration off for requests that state it in its own field.
    n: int | None = None

    def __post_init__(self) -> None:
        """Raises TypeError: it comes from JSON, where a field may be anything."""
        given: tuple[object, ...] = (self.guided_decoding, self.logit_bias)
        if not isinstance(self.method, str | Mapping) or not all(isinstance(one, Mapping) for one in given):
            raise TypeError
        if not all(re.fullmatch(r"[0-9]{1,18}", key) for key in self.logit_bias):
            raise TypeError

    @classmethod
    def parse(cls, annotations: Iterable[str]) -> "RequestAnnotation":
        """Raises InvalidRequest for one that is no JSON object, or has unknown fields or fields of another kind."""
        found = [text.removeprefix(MARK) for text in annotations if text.startswith(MARK)]
        if not found:
            return cls()
        try:
            stated = json.loads(found[-1])
            return cls(**stated)
        except (ValueError, TypeError, RecursionError):
            known = ", ".join(cls.__dataclass_fields__)
            raise InvalidRequest(f"an annotation {MARK}... holds a JSON object of {known}: {found[-1]!r:.80}") from None


@dataclass(frozen=True)
class DynamoRequest:
    """A request of Dynamo's front end."""

    prompt: Sequence[int]  # its token ids
    # the tokens that another worker has made and delivered, of all choices in turn (`interleaving.py`)
    given: Sequence[int]
    params: SamplingParams  # how tokens are chosen, and when the answer ends, counted from its first token
    method: Method  # the technique
    priority: int = 0  # lower is sooner
    # that of the models which have made what is given (`migration.py`); None where nothing is
    identity: str | None = None

    def request(self, llm: LLM) -> Request:
        """For the engine. Raises InvalidRequest for a prompt or parameters that the model cannot take."""
        request = llm.request(self.prompt, self.params, self.method)
        request.priority = self.priority
        return request

    def continued(self, request: Request) -> ChoiceInterleaver:
        """Let a request for the engine go on behind what is given. Returns whose turn it is to send a token."""
        answers, interleaver = deinterleave(self.given, self.params, request.tokenizer)
        if self.given:
            request.take_over(*answers)
        return interleaver

    def migration_pointer(self, identity: str) -> dict[str, str]:
        """What goes along with each token (`migration.py`). `identity`: that of the models here."""
        own = MigrationState(len(self.prompt), self.params.max_tokens, self.params.min_tokens, identity)
        return own.pointer(self.prompt)


def parse_request(
    message: Mapping[str, Any], id: str, generation: Mapping[str, float], grammars: Grammars
) -> DynamoRequest:
    """A front end's message. Takes a while if it has a grammar: call it off the event loop.

    Args:
        message: a `PreprocessedRequest` of Dynamo.
        id: the request's, which is the same at every worker; without a seed, noise is drawn from it.
        generation: the model's own sampling defaults.
        grammars: those of the model's tokenizer.

    Raises:
        InvalidRequest: names the field that cannot be followed.
        PointerVersionMismatch: another version's worker has begun the answer.
    """
    _refuse_unknown(message)
    extras = RequestAnnotation.parse(message.get("annotations") or ())
    tokens = message["token_ids"]
    state = read_pointer(tokens, message.get("migration_link"))
    length = len(tokens) if state is None else state.length
    params = _params(message, id, generation, extras)
    if state is not None and length < len(tokens):  # Dynamo has lowered the most by the tokens of all choices
        params = replace(params, max_tokens=state.max_tokens, min_tokens=state.min_tokens)
    guided = _group(message, "sampling_options").get("guided_decoding") or extras.guided_decoding
    if guided:
        params = replace(params, constraint=_constraint(guided, grammars))
    routing = message.get("routing") or {}
    stated = {"name": extras.method} if isinstance(extras.method, str) else dict(extras.method)
    return DynamoRequest(
        tokens[:length],
        tokens[length:],
        params,
        method(str(stated.pop("name", "plain")), **stated),
        -int(routing.get("priority") or 0),  # Dynamo's is higher for what is sooner
        None if state is None or length == len(tokens) else state.identity,
    )


def _params(
    message: Mapping[str, Any], id: str, generation: Mapping[str, float], extras: RequestAnnotation
) -> SamplingParams:
    """What is asked of the tokens that are left, as Dynamo counts."""
    sampling, stop = _group(message, "sampling_options"), _group(message, "stop_conditions")
    stated: dict[str, Any] = {"temperature": TEMPERATURE, **generation}
    for name in FOLLOWED["sampling_options"] - {"seed", "guided_decoding"}:
        if (value := sampling.get(name)) is not None:
            stated[name] = as_written(value)
    if extras.n is not None:
        if stated.get("n", extras.n) != extras.n:
            raise InvalidRequest(f"n is {stated['n']} in the request and {extras.n} in its annotation: state it once")
        stated["n"] = extras.n
    if stated.get("top_k", 0) < 0:  # vLLM's way to say all
        stated["top_k"] = 0
    seed = sampling.get("seed")
    ids = {*(stop.get("stop_token_ids") or ()), *(stop.get("stop_token_ids_visible") or ())}
    ignore_eos = bool(stop.get("ignore_eos"))
    return SamplingParams(
        **stated,
        max_tokens=stop.get("max_tokens"),
        min_tokens=stop.get("min_tokens") or 0,
        stop=tuple(stop.get("stop") or ()),
        stop_token_ids=tuple(sorted(ids | (set() if ignore_eos else {*(stop.get("stop_token_ids_hidden") or ())}))),
        ignore_eos=ignore_eos,
        logprobs=_group(message, "output_options").get("logprobs"),
        seed=seed_of(id) if seed is None else seed,
        logit_bias={int(key): bias for key, bias in extras.logit_bias.items()},
    )


def as_written(value: Any) -> Any:
    """Dynamo carries numbers as float32: the shortest decimal that is the same float32 is what the client wrote."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def seed_of(id: str) -> int:
    """The seed of a request that states none. Every worker finds the same."""
    return int.from_bytes(hashlib.blake2b(id.encode(), digest_size=8).digest(), "little") >> 1


def _constraint(guided: Mapping[str, Any], grammars: Grammars) -> ConstraintFactory:
    asked = {name: value for name, value in guided.items() if value is not None and name != "backend"}
    if len(asked) != 1 or not asked.keys() <= GUIDED.keys():
        raise InvalidRequest(f"guided_decoding takes one of {', '.join(GUIDED)}, not {', '.join(asked)}")
    ((name, given),) = asked.items()
    value: Any = given
    if name == "json" and isinstance(given, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(given)
    fits, wanted = GUIDED[name]
    if not fits(value):
        raise InvalidRequest(f"guided_decoding.{name} must be {wanted}, not {value!r:.80}")
    made: Grammar | str
    if name == "json":
        made = grammar.json_schema(value)
    else:
        made = {"regex": grammar.regex, "choice": grammar.choice, "grammar": grammar.lark}[name](value)
    return grammars.compile(made)


def _group(message: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return message.get(name) or {}


def _refuse_unknown(message: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a field that would change the answer and is not followed."""
    for name in UNSUPPORTED:
        if message.get(name):
            raise InvalidRequest(f"{name} is not supported: only text is")
    for group, read_here in FOLLOWED.items():
        idle = NEUTRAL.get(group, {})
        for name, value in _group(message, group).items():
            if name not in read_here and value is not None and value not in idle.get(name, ()):
                raise InvalidRequest(f"{group}.{name} is not supported: leave it out")
