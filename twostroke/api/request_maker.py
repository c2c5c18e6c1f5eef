"""The requests that an `LLM` runs, made and checked before any of them is submitted."""

import operator
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from twostroke.api.open_engine import MAIN, OpenedEngine
from twostroke.api.prefills import BatchRoom, Classifier, Embedder, Reranker, TextClass
from twostroke.api.reasoning.reasoning import Reasoning
from twostroke.api.scoring import TextOrTokens, scored_request
from twostroke.engine.options import OWN_DRAFTS
from twostroke.engine.request import Request
from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.errors import ContextLengthExceeded, EngineStopped, InvalidRequest, KVError
from twostroke.kv.cache import KVCache
from twostroke.kv.entries_by_head import require_heads, require_parts
from twostroke.methods import Method, Plain, Prompt
from twostroke.models.checkpoints.chat_tokens import ChatTokens
from twostroke.sampling.params import SamplingParams
from twostroke.system.process_exit import stay_if_process_ends

OPENED = ("engine", "model", "pool", "backend", "tiers")  # attributes that an LLM has until it is closed
NO_ANSWER = SamplingParams(max_tokens=0)  # of requests that only prefill


class RequestMaker:
    """Base of `LLM`: what makes its requests, and refuses what its model cannot do. `LLM` describes the attributes."""

    def __init__(self, opened: OpenedEngine) -> None:
        checkpoint = opened.checkpoint
        self.name, self.config = checkpoint.name, checkpoint.config
        self.engine, self.backend = opened.engine, opened.backend
        self.model = self.engine.models[MAIN]
        self.tokenizer, self.pool = self.model.tokenizer, self.model.pool
        self.embedder = Embedder.of(checkpoint)
        self.classifier = Classifier.of(checkpoint, self.embedder)
        self.reranker = Reranker.of(self.tokenizer, self.name, checkpoint.pooling.ranks)

    def __getattr__(self, name: str) -> Any:
        if name in OPENED and "tokenizer" in self.__dict__:
            stay_if_process_ends()
            raise EngineStopped(f"{self.name} is closed: open it again")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and its answer: the model's context, or less if the pool is smaller."""
        return self.model.max_model_len

    def chat_prompt(self, messages: str | Sequence[Mapping[str, Any]]) -> ChatTokens:
        """The prompt that `chat` answers. Raises InvalidRequest if there is no chat template, or it refuses."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.tokenizer.encode_chat(messages)

    @cached_property
    def reasoning(self) -> Reasoning | None:
        """The thoughts that the model's answers have, by its chat template; None if they have none."""
        return Reasoning.of(self.tokenizer, self.config.vocab_size)

    def chat_params(self, prompt: str | Sequence[int], params: SamplingParams) -> SamplingParams:
        """The parameters of an answer to a rendered conversation: they apply behind its thought, if it has one."""
        if self.reasoning is None:
            return params
        return self.reasoning.applied(params, self.reasoning.phase_after(prompt))

    def prefill_request(self, prompt: TextOrTokens, after: KVCache | None = None, model: str | None = None) -> Request:
        """Make the request that `prefill` runs. Its result is the value. Raises InvalidRequest."""
        tokens = self.encode(prompt, add_bos=None if after is None else False)
        if after is not None:
            require_value(after)

        def program() -> Program:
            return (yield Prefill(tokens, after, model))

        return Request(program, SamplingParams(), self.tokenizer, len(tokens))

    def decode_request(self, kv: KVCache, params: SamplingParams, model: str | None = None) -> Request:
        """Make the request that `decode` runs. Raises InvalidRequest."""
        require_value(kv)
        params.check_vocabulary(self.config.vocab_size)
        if params.n != 1:
            raise InvalidRequest("decode continues one value: fork it by decoding it several times")

        def program() -> Program:
            return (yield Decode(kv, model=model))

        return Request(program, params, self.tokenizer)

    def requests(
        self, prompts: Sequence[TextOrTokens], params: SamplingParams, method: Method | None = None
    ) -> list[Request]:
        """Make the requests that `generate` runs, one for each prompt. Raises InvalidRequest."""
        if isinstance(prompts, str) or any(isinstance(prompt, int) for prompt in prompts):
            raise InvalidRequest("generate takes a list of prompts: put a single one into a list")
        return [self.request(prompt, params, method) for prompt in prompts]

    def request(self, prompt: TextOrTokens, params: SamplingParams, method: Method | None = None) -> Request:
        """Make the request that `stream` runs. Raises InvalidRequest, ContextLengthExceeded."""
        if method is not None and not isinstance(method, Method):
            raise InvalidRequest(f'a method is made by twostroke.method("repeat", ...), not {method!r:.60}')
        tokens, chosen = self.encode(prompt), method or Plain()
        if not tokens:
            raise InvalidRequest("the prompt is empty: give at least one token")
        self.model.require_room(len(tokens))
        self.require_method(chosen)
        params.check_vocabulary(self.config.vocab_size)
        if params.prompt_logprobs is not None or params.max_tokens == 0:
            made = scored_request(tokens, params, chosen, self.tokenizer)
        else:
            plain = type(chosen) is Plain  # it looks at the tokens alone
            asked = Prompt(prompt if isinstance(prompt, ChatTokens) and not plain else tokens, self.tokenizer)
            made = Request(partial(chosen.program, asked), params, self.tokenizer, len(tokens))
        made.prompt = tokens
        return made

    def require_method(self, method: Method) -> None:
        """Raise InvalidRequest if the method needs a companion that is not there, or heads that may differ.

        Any method needs a model that decodes.
        """
        if self.config.both_ways:
            raise InvalidRequest(
                f"{self.name} makes embeddings alone, since its attention is in both directions: call /v1/embeddings "
                "or embed, or open a model that generates"
            )
        for role in method.companions:
            if role not in self.engine.models:
                how = f"--draft {role}" if role in OWN_DRAFTS else f"--{role} NAME"
                raise InvalidRequest(f"method {method.name} needs a {role}: open the model with one ({how})")
        if method.biased and not self.backend.takes_bias:
            raise InvalidRequest(
                f"method {method.name} gives heads other budgets, which the {self.backend.label} backend cannot: use "
                "the native backend, or the reference in one rank"
            )
        if method.by_head:
            try:
                require_heads(self.pool.geometry)
                if method.makes_entries:
                    require_parts(self.pool.geometry)
            except KVError as error:
                raise InvalidRequest(f"method {method.name} cannot run with model {self.name}: {error}") from None

    def encode(self, prompt: TextOrTokens, add_bos: bool | None = None) -> list[int]:
        """Token ids of a prompt; ids are not changed. Raises InvalidRequest, ContextLengthExceeded for too many."""
        if isinstance(prompt, str):
            tokens = self.tokenizer.encode(prompt, add_bos=add_bos)
        else:
            try:
                tokens = [operator.index(token) for token in prompt]
            except TypeError:
                raise InvalidRequest(f"a prompt is a text or a list of token ids, not {prompt!r:.60}") from None
        if unknown := [token for token in tokens if not 0 <= token < self.config.vocab_size]:
            raise InvalidRequest(f"token ids must be from 0 to {self.config.vocab_size - 1}, not {unknown[0]}")
        if len(tokens) > self.config.max_position:
            raise ContextLengthExceeded(
                f"the prompt has {len(tokens)} tokens, past the {self.config.max_position} of model {self.name}: "
                f"shorten it"
            )
        return tokens

    def embedding_request(self, inputs: Sequence[Sequence[int]]) -> Request:
        """Make the request that `embed` runs. Its result is a list of [hidden] float32. Raises InvalidRequest."""
        room = self._batch_room(inputs)
        count = sum(map(len, inputs))
        return Request(partial(self.embedder.program, inputs, room), NO_ANSWER, self.tokenizer, count)

    def classifying_request(self, inputs: Sequence[Sequence[int]]) -> Request:
        """Make the request that `classify` runs; `Classifier.finish` reads its results. Raises InvalidRequest."""
        if self.classifier is None:
            raise InvalidRequest(f"{self.name} has no head that classifies: ask it for a choice instead")
        room, count = self._batch_room(inputs), sum(map(len, inputs))
        return Request(partial(self.classifier.embedder.program, inputs, room), NO_ANSWER, self.tokenizer, count)

    def classify(self, texts: Sequence[TextOrTokens]) -> list[TextClass]:
        """Tell the class of each text, by a model with a head for it (transformers' `...ForSequenceClassification`).

        Raises InvalidRequest: the model has no such head, or a text is empty.
        """
        classifier = self.classifier
        encode = self.embedder.encode if classifier is None else classifier.embedder.encode
        request = self.classifying_request([encode(self.tokenizer, text) for text in texts])
        self.engine.run([request])
        return [] if classifier is None else [classifier.finish(one) for one in request.result]

    def reranking_request(self, pairs: Sequence[list[int]]) -> Request:
        """Make the request that scores pairs of `Reranker.pair`. Its result is a list of numbers from 0 to 1.

        Raises InvalidRequest if the model does not rank, or a pair is too long.
        """
        reranker = self.reranker
        if reranker is None:
            raise InvalidRequest(f"{self.name} ranks no documents: open a reranker, such as Qwen3-Reranker")
        room = self._batch_room(pairs)
        count = sum(map(len, pairs))
        return Request(partial(reranker.program, pairs, room, self.model.compiled), NO_ANSWER, self.tokenizer, count)

    def _batch_room(self, inputs: Sequence[Sequence[int]]) -> BatchRoom:
        """Room for several steps at once, in a part of the pool. Raises InvalidRequest for an input that has none."""
        for tokens in inputs:
            self.model.require_entries(len(tokens))
            self.encode(tokens)
        return BatchRoom(8 * self.engine.config.max_step_tokens, self.pool.max_entries // 4, self.pool.page_size)


def require_value(kv: object) -> None:
    """Raise InvalidRequest unless `kv` is a KVCache."""
    if not isinstance(kv, KVCache):
        raise InvalidRequest(f"a KVCache is needed here, not {kv!r:.60}")
