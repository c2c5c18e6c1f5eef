"""The public API: a model that prefills, decodes, generates and chats."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, overload

import numpy as np

from twostroke.api.completion import Completion, Decoding, Output
from twostroke.api.embedding import BatchRoom, Embedder
from twostroke.api.open_engine import MAIN, open_engine
from twostroke.api.reasoning.reasoning import Reasoning
from twostroke.api.reranking import Reranker
from twostroke.api.scoring import Score, score, scored_request
from twostroke.backends.choose import require_device
from twostroke.engine.options import GUESSER, LLMOptions, companion_parts
from twostroke.engine.output import Token
from twostroke.engine.request import Request
from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.errors import EngineStopped, InvalidRequest, KVError
from twostroke.fields import check_arguments, rules
from twostroke.kv.cache import KVCache
from twostroke.kv.entries_by_head import require_heads
from twostroke.methods import Method, Plain, Prompt
from twostroke.models.checkpoints.catalog import DEFAULT_MODEL
from twostroke.models.checkpoints.chat_tokens import ChatTokens
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.fetch import Progress
from twostroke.models.config import ModelConfig
from twostroke.sampling.params import SamplingParams, sampling_params

OPENED = ("engine", "model", "pool", "backend", "tiers")  # attributes that an LLM has until it is closed
TextOrTokens = str | Sequence[int]  # a prompt


def require_options(arguments: Mapping[str, Any]) -> None:
    """Check arguments of `LLM` as far as this is possible without its model. Raises InvalidRequest."""
    check_arguments(LLMOptions, arguments)
    require_device(arguments["backend"], arguments["device"], arguments["tp"])
    for companion in (arguments["student"], arguments["draft"]):
        if isinstance(companion, str):
            companion_parts(companion)


NO_ANSWER = SamplingParams(max_tokens=0)  # of requests that only prefill


class LLM:
    """A model, its engine and its KV pool.

    Any number of threads may use it, and their requests are batched. As a context manager it is closed at the end.

    Attributes:
        tokenizer: converts text to ids and back.
        config: description of the model.
        path: the checkpoint's (first) file.
        generation: the checkpoint's sampling defaults, if any: fields of `SamplingParams`. The commands `chat` and
            `serve` use them; the methods of this class are greedy by default.
        pool: holds its KV values.
        engine: runs its requests.
        backend: computes its steps.
        embedder: makes embeddings of texts, as the model's files say.
        reranker: tells how well documents answer a query; None if the model was not trained for it.
        tiers: where pages may be besides the pool, with what went in and out.
        verified: the result of the check of its weights; None without `check`.
    """

    def __init__(
        self,
        model: str | Checkpoint = DEFAULT_MODEL,
        *,
        backend: str = "auto",
        device: str = "cpu",
        dtype: str = "auto",
        kv_dtype: str = "auto",
        weights: str = "stored",
        student: str | Checkpoint | None = None,
        draft: str | Checkpoint | None = None,
        threads: int | None = None,
        tp: int = 1,
        kv_bytes: int | None = None,
        page_size: int = 16,
        kv_reserve: bool = False,
        spare_bytes: int = 0,
        prefix_index: str = "radix",
        kv_host: int | None = None,
        kv_disk: str | Path | None = None,
        kv_disk_bytes: int | None = None,
        kv_remote: str | None = None,
        kv_compress: bool = False,
        max_step_tokens: int = 512,
        max_running: int = 256,
        itl_ms: float | None = None,
        progress: Progress | None = None,
        check: bool = False,
    ) -> None:
        """Open a model; fetch it first if necessary.

        Args:
            model: a catalog name, a GGUF file, a Hugging Face directory, a hub id, or a `Checkpoint`.
            backend: "native" (CPU, quantized or bfloat16 weights), one of its variants ("native-amx",
                "native-avx512", ...), "reference" (PyTorch), or "auto" (native if it can run the model).
            device: any torch device.
            dtype: dtype of activations (and of the reference's weights): "float32", "bfloat16", or "auto".
            kv_dtype: how K and V are stored: "float32" (reference), "bfloat16", "int8" in half the memory, or "k8v4", K
                of 8 bits and V of 4, in two fifths (docs/kv-bits.md); "auto" is the backend's own, bfloat16 on CPUs.
            weights: matrices as "stored" in the file, or re-encoded on load as "bf16", "int8" or "int4" (or, simulated,
                "int3" or "int2").
            student: a model of the same KV geometry, for techniques that hand over KV: "int4" (this model's weights,
                re-encoded), "MODEL" or "MODEL@int4". It shares pool and backend.
            draft: a model with the same tokenizer that guesses tokens; names as for `student`. If its geometry
                differs, it has a separate pool with the same number of pages. "mtp" is the model's own head of
                multi-token prediction, if its files have one (docs/families.md).
            threads: CPU threads, at most 8 per core, of each rank. None uses one per core that is available to this
                process by its affinity and its container's CPU quota; ranks divide these.
            tp: tensor parallelism: the number of processes (ranks) that compute together, on this host or started by
                `torchrun`. The bits of all results are those of one (docs/tensor-parallelism.md).
            kv_bytes: bytes for KV pages. None uses a quarter of the memory that is available to this process (up to
                its container's limit; file cache counts as available), at most 4 GiB, and no more than weights and the
                process itself leave; on a GPU, 70% of what its memory has free beside the weights.
            page_size: entries per page.
            kv_reserve: whether to take all of the pool's memory at start, so that a lack of memory shows then and not
                at the peak. It has no effect on a GPU, where the pool is always taken at once.
            spare_bytes: memory to leave free for what else the process or its container does, when it is added up what
                the engine will take.
            prefix_index: "radix", "hash", or "off" (tiers then serve values only).
            kv_host: bytes of ordinary memory for what the prefix index evicts from the pool. None: none.
            kv_disk: a directory for prefixes and values, which outlives the process. Several processes may share it.
                With it or `kv_remote`, opening takes about a second longer, to measure what computing costs.
            kv_disk_bytes: the most that it takes; None: a tenth of what is free there, at most 50 GiB.
            kv_remote: the URL of a server that speaks Redis' protocol, such as "redis://localhost:6379/0".
            kv_compress: whether pages are written to both in a smaller form, exactly (docs/tiers.md).
            max_step_tokens: token budget of a step; longer prompts are prefilled in chunks.
            max_running: maximum number of choices that run at once.
            itl_ms: objective for ITL in milliseconds: prefill chunks shrink to meet it while anything decodes. Opening
                the model then takes about a second longer, to measure its steps.
            progress: called during downloads, and while weights are encoded, with (stage, bytes done, total bytes).
            check: check the weights first: their values, and their files' digests where they are known
                (`checkpoints.verify`). It takes as long as decoding all weights; `verified` says what was checked.

        Raises:
            CheckpointError: the model cannot be found, fetched or read. DamagedCheckpoint: the check found damage;
            names the tensor or the file. InvalidRequest: an argument is out of range.
            KVError: a tier cannot be opened.
            GeometryMismatch: the student or the draft does not fit the model; names the field.
        """
        require_options(given := locals())  # before anything is fetched
        opened = open_engine(LLMOptions(**{name: given[name] for name in rules(LLMOptions)}), progress)
        checkpoint, self.verified, self.memory = opened.checkpoint, opened.verified, opened.memory
        self.name, self.config, self.path = checkpoint.name, checkpoint.config, checkpoint.files[0]
        self.generation = dict(checkpoint.generation)
        self.engine, self.backend, self.tiers = opened.engine, opened.backend, opened.tiers
        self.model = self.engine.models[MAIN]
        self.tokenizer, self.pool = self.model.tokenizer, self.model.pool
        self.embedder = Embedder.of(checkpoint)
        self.reranker = Reranker.of(self.tokenizer, self.name, checkpoint.pooling.ranks)

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and its answer: the model's context, or less if the pool is smaller."""
        return self.model.max_model_len

    # The two strokes ------------------------------------------------------------------------------------------

    def prefill(self, prompt: TextOrTokens, after: KVCache | None = None, *, model: str | None = None) -> KVCache:
        """Stroke one: enter a text or token ids, after the entries of `after` if given.

        The result is a new value that shares pages with `after`, which does not change. A pending token of `after` is
        entered first. `model` is "student" or "draft" to use that companion.

        Raises:
            InvalidRequest: nothing to enter, ids outside the vocabulary, or more tokens than the context holds.
            GeometryMismatch: `after` has another geometry. OutOfPages: no room.
        """
        request = self.prefill_request(prompt, after, model)
        self.engine.run([request])
        return request.result

    def decode(
        self, kv: KVCache, params: SamplingParams | None = None, *, model: str | None = None, **sampling: Any
    ) -> Decoding:
        """Stroke two: continue a value token by token.

        Args:
            kv: the value to continue; it does not change.
            params, sampling: `SamplingParams`, or its fields (max_tokens=, temperature=, ...).
            model: "student" or "draft" to use that companion.

        Returns:
            An iterator of `Token`. At the end its `kv` is the continued value, with the last token pending.

        Raises:
            InvalidRequest: a parameter is out of range, or n is not 1. While it is iterated: ContextLengthExceeded if
                the value leaves no room for a token.
        """
        request = self.decode_request(kv, sampling_params(params, sampling), model)
        return Decoding(self.engine, self.engine.submit(request))

    # Whole requests -------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[TextOrTokens],
        params: SamplingParams | None = None,
        *,
        method: Method | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """Answer a list of prompts (texts or token ids) in one batch.

        Args:
            prompts: the prompts.
            params, sampling: `SamplingParams`, or its fields.
            method: the technique; None is plain generation.

        Raises:
            InvalidRequest: a prompt or a parameter is out of range, or a companion is missing.
            ContextLengthExceeded: a prompt leaves no room for an answer within `max_model_len`. OutOfPages: other
            values hold the room that a prompt needs. An answer that outgrows the room ends with "length".
        """
        requests = self.requests(prompts, sampling_params(params, sampling), method)
        self.engine.run(requests)
        return [Completion.of(request, request.events) for request in requests]

    def stream(
        self,
        prompt: TextOrTokens,
        params: SamplingParams | None = None,
        *,
        method: Method | None = None,
        **sampling: Any,
    ) -> Decoding:
        """Answer one prompt token by token. Arguments and errors are those of `generate`.

        A prompt or a parameter that is out of range is refused at once; other errors are raised by the iterator.
        """
        request = self.request(prompt, sampling_params(params, sampling), method)
        return Decoding(self.engine, self.engine.submit(request))

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        method: Method | None = None,
        **sampling: Any,
    ) -> Completion:
        """Answer a list of messages, [{"role": ..., "content": ...}, ...], through the model's chat template.

        A text is one message of the user. Other arguments and errors are those of `generate`; InvalidRequest also if
        there is no chat template, or it refuses the messages. A thought is set apart from the text, as `thought`.
        """
        prompt = self.chat_prompt(messages)
        params = self.chat_params(prompt, sampling_params(params, sampling))
        return self.generate([prompt], params, method=method)[0]

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

    def close(self) -> None:
        """End all requests, and free the weights and the pool.

        Requests of other threads end with EngineStopped. Values that are still held stay readable; what they hold is
        freed with them. A second call does nothing.
        """
        if "engine" in self.__dict__:
            self.engine.close()
            for name in OPENED:
                del self.__dict__[name]

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name in OPENED and "tokenizer" in self.__dict__:
            raise EngineStopped(f"{self.name} is closed: open it again")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # Requests that are not submitted yet ----------------------------------------------------------------------

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

    def embed(
        self,
        texts: Sequence[TextOrTokens],
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalized: bool | None = None,
    ) -> np.ndarray:
        """Compute embeddings of texts (or token ids): prefills alone, packed into full steps.

        Args:
            texts: the texts.
            prompt: the name of a text of the model's that comes before each ("query"); None for its default.
            dimensions: keep only so many numbers, the first, of a model that was trained for it (Kusupati et al. 2022).
            normalized: whether an embedding has length 1; None as the model's files say.

        Returns:
            [texts, dimensions] float32.

        Raises:
            InvalidRequest: an empty text, an unknown prompt, or a model whose pooling is not supported.
            ContextLengthExceeded: a text is longer than the context.
        """
        inputs = [self.embedder.encode(self.tokenizer, text, prompt) for text in texts]
        request = self.embedding_request(inputs)
        self.engine.run([request])
        made = [self.embedder.finish(one, dimensions, normalized) for one in request.result]
        return np.stack(made) if made else np.empty((0, self.config.hidden_size), np.float32)

    def embedding_request(self, inputs: Sequence[Sequence[int]]) -> Request:
        """Make the request that `embed` runs. Its result is a list of [hidden] float32. Raises InvalidRequest."""
        room = self._batch_room(inputs)
        count = sum(map(len, inputs))
        return Request(partial(self.embedder.program, inputs, room), NO_ANSWER, self.tokenizer, count)

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

    @overload  # a text is a sequence of texts too, but never meant as one
    def score(  # pyright: ignore[reportOverlappingOverload]
        self, prompt: TextOrTokens, continuation: TextOrTokens
    ) -> Score: ...
    @overload
    def score(
        self, prompt: TextOrTokens | Sequence[TextOrTokens], continuation: Sequence[TextOrTokens]
    ) -> list[Score]: ...
    def score(
        self, prompt: TextOrTokens | Sequence[TextOrTokens], continuation: TextOrTokens | Sequence[TextOrTokens]
    ) -> Score | list[Score]:
        """Compute how likely a continuation of a prompt is. `twostroke.api.scoring` says how texts become tokens.

        Args:
            prompt: a text or token ids; or a list of several.
            continuation: a text or token ids; or a list of several. With one prompt, all of them continue it, and its
                entries are computed once; with a list of prompts, each continues the prompt at its index.

        Returns:
            A `Score`, or for a list of continuations a list of them.

        Raises:
            InvalidRequest: an empty continuation, lists of different lengths, ids outside the vocabulary, or more
                tokens than the context holds. OutOfPages: no room.
        """
        return score(self.engine, self.tokenizer, prompt, continuation)

    def request(self, prompt: TextOrTokens, params: SamplingParams, method: Method | None = None) -> Request:
        """Make the request that `stream` runs. Raises InvalidRequest, ContextLengthExceeded."""
        if method is not None and not isinstance(method, Method):
            raise InvalidRequest(f'a method is made by twostroke.method("repeat", ...), not {method!r:.60}')
        tokens, chosen = self.encode(prompt), method or Plain()
        self.model.require_room(len(tokens))
        self.require_method(chosen)
        params.check_vocabulary(self.config.vocab_size)
        if params.prompt_logprobs is not None or params.max_tokens == 0:
            return scored_request(tokens, params, chosen, self.tokenizer)
        plain = type(chosen) is Plain  # it looks at the tokens alone
        asked = Prompt(prompt if isinstance(prompt, ChatTokens) and not plain else tokens, self.tokenizer)
        return Request(partial(chosen.program, asked), params, self.tokenizer, len(tokens))

    def require_method(self, method: Method) -> None:
        """Raise InvalidRequest if the method needs a companion that is not there, or heads that may differ."""
        for role in method.companions:
            if role not in self.engine.models:
                how = f"--draft {GUESSER}" if role == GUESSER else f"--{role} NAME"
                raise InvalidRequest(f"method {method.name} needs a {role}: open the model with one ({how})")
        if method.biased and not self.backend.takes_bias:
            raise InvalidRequest(
                f"method {method.name} gives heads other budgets, which the {self.backend.label} backend cannot: use "
                "the native backend, or the reference in one rank"
            )
        if method.by_head:
            try:
                require_heads(self.pool.geometry)
            except KVError as error:
                raise InvalidRequest(f"method {method.name} cannot run with model {self.name}: {error}") from None

    def encode(self, prompt: TextOrTokens, add_bos: bool | None = None) -> list[int]:
        """Token ids of a prompt; ids are not changed. Raises InvalidRequest if the model cannot take the prompt."""
        if isinstance(prompt, str):
            tokens = self.tokenizer.encode(prompt, add_bos=add_bos)
        else:
            try:
                tokens = [operator.index(token) for token in prompt]
            except TypeError:
                raise InvalidRequest(f"a prompt is a text or a list of token ids, not {prompt!r:.60}") from None
        if any(not 0 <= token < self.config.vocab_size for token in tokens):
            raise InvalidRequest(f"token ids must be from 0 to {self.config.vocab_size - 1}")
        if len(tokens) > self.config.max_position:
            raise InvalidRequest(
                f"the prompt has {len(tokens)} tokens, past the {self.config.max_position} of model {self.name}: "
                f"shorten it"
            )
        return tokens

    def __repr__(self) -> str:
        return f"LLM({self.name!r}, {self.backend.label if 'backend' in self.__dict__ else 'closed'})"


def require_value(kv: object) -> None:
    """Raise InvalidRequest unless `kv` is a KVCache."""
    if not isinstance(kv, KVCache):
        raise InvalidRequest(f"a KVCache is needed here, not {kv!r:.60}")


__all__ = ["LLM", "Completion", "Decoding", "ModelConfig", "Output", "SamplingParams", "TextOrTokens", "Token"]
