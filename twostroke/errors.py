"""The typed errors of Twostroke. Each message is one line that says what to do."""


class TwostrokeError(Exception):
    """Base of all typed errors; the CLI prints its message alone, without a traceback."""


class CheckpointError(TwostrokeError):
    """A checkpoint cannot be found, fetched, read or parsed; the message names the file and the tensor."""


class UnknownModel(CheckpointError):
    """The name is neither in the catalog, nor a local path, nor a reachable hub id."""


class UnsupportedArchitecture(CheckpointError):
    """The checkpoint's architecture, or a variant that it uses, is not implemented."""


class DamagedCheckpoint(CheckpointError):
    """A check of the weights has found values that no model has, or bytes that are not those of the digest."""


class FetchError(CheckpointError):
    """A download failed or its digest is wrong."""


class KVError(TwostrokeError):
    """An operation on a KV cache is not possible; the values involved have not changed."""


class GeometryMismatch(KVError):
    """Two values, or a value and a model, differ in a field of the KV geometry; the message names it."""


class OutOfPages(KVError):
    """The pool has no free page left and nothing could be evicted.

    `pages` is the number of the pool's pages that were asked for; 0 if something else has no room.
    """

    def __init__(self, message: str, pages: int = 0) -> None:
        super().__init__(message)
        self.pages = pages


class PageLost(KVError):
    """Pages of a value are gone from the tier that held them, or damaged there; the message names the tier."""


class CorruptFile(KVError):
    """A saved KV cache is truncated, altered or of another format version."""


class EngineStopped(TwostrokeError):
    """The engine takes no more requests, because its model was closed."""


class EngineFailed(EngineStopped):
    """The engine takes no more requests, because a step has failed."""


class EngineRestarting(EngineStopped):
    """The engine's process has died, and another one is started."""


class RankLost(EngineFailed):
    """A process that computes a part of the model (tensor parallelism) has ended, or does not answer."""


class InvalidRequest(TwostrokeError):
    """A request's parameters are out of range or do not fit the model."""


class ContextLengthExceeded(InvalidRequest, OutOfPages):
    """A prompt does not fit into the model's context or into the KV pool, or it leaves no room for an answer.

    It is raised before anything is computed. An answer that outgrows either ends with "length" instead.
    """


class NotFinite(TwostrokeError):
    """A model computes NaN or infinity where it should compute logits: its weights are damaged."""

    def __init__(self, model: str) -> None:
        super().__init__(f"{model} computes NaN: its file may be damaged; check it with --check")


class EndsEngine(TwostrokeError):
    """A request that was computed whenever the engine's process died; the engine goes on without it."""
