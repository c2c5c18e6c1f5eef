"""The public API: a model that prefills, decodes, generates and chats."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from twostroke.api.completion import Completion, Decoding
from twostroke.api.open_engine import llm_options, open_engine
from twostroke.api.request_maker import OPENED, RequestMaker
from twostroke.api.scoring import Score, TextOrTokens, score
from twostroke.kv.cache import KVCache
from twostroke.methods import Method
from twostroke.models.checkpoints.catalog import DEFAULT_MODEL
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.fetch import Progress
from twostroke.sampling.params import SamplingParams, sampling_params


class LLM(RequestMaker):
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
        classifier: tells the class of a text; None if the model has no head for it.
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
        kv_groups: str = "auto",
        weights: str = "stored",
        max_model_len: int | None = None,
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
        stream_weights: bool = False,
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
            kv_groups: "layers" gives each layer pages of its own, so that budgets by layer save memory (techniques.md).
            weights: matrices as "stored" in the file, or re-encoded on load as "bf16", "int8" or "int4" (or, simulated,
                "int3" or "int2").
            max_model_len: most tokens of a prompt and its answer; chooses LongRoPE's factors (docs/families.md).
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
            prefix_index: "radix" (also by the name "hash"), or "off" (tiers then serve values only).
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
            stream_weights: keep no layer in memory: every pass reads them from the file (docs/results/strokes.md).

        Raises:
            CheckpointError: the model cannot be found, fetched or read. DamagedCheckpoint: the check found damage;
            names the tensor or the file. InvalidRequest: an argument is out of range. KVError: a tier cannot be opened.
            GeometryMismatch: the student or the draft does not fit the model; names the field.
        """
        options = llm_options(locals())  # checked before anything is fetched
        opened = open_engine(options, progress)
        super().__init__(opened)
        self.path, self.generation = opened.checkpoint.files[0], dict(opened.checkpoint.generation)
        self.verified, self.memory, self.tiers = opened.verified, opened.memory, opened.tiers

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
        return np.stack(made) if made else np.empty((0, self.embedder.size), np.float32)

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

    def close(self) -> None:
        """End all requests, and free the weights and the pool.

        Requests of other threads end with EngineStopped. Values that are still held stay readable; what they hold is
        freed with them. A second call does nothing.
        """
        if "engine" in self.__dict__:
            self.engine.close()
            for name in OPENED:
                del self.__dict__[name]

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self.name!r}, {self.backend.label if 'backend' in self.__dict__ else 'closed'})"
