"""What a model of several is opened from, what is known of it before, and how much memory all may take together."""

from dataclasses import dataclass
from pathlib import Path

from twostroke.engine.memory_budget import PROCESS_BYTES
from twostroke.fields import Checked, flag, integer, number, size
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.config import ModelConfig
from twostroke.server.engine_process.launch import Launch


@dataclass(frozen=True)
class ModelSource:
    """One model.

    Attributes:
        name: what clients call it.
        launch: starts its engine's process.
        path: its file or directory.
        file_bytes: what its files take.
        config: what it is made of.
        kv_bytes: what its pool takes; None if that is chosen when it is opened.
    """

    name: str
    launch: Launch
    path: Path
    file_bytes: int
    config: ModelConfig
    kv_bytes: int | None = None

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, launch: Launch, kv_bytes: int | None = None, name: str | None = None
    ) -> "ModelSource":
        """A checkpoint's, by its own name unless another is given; its tensors and its tokenizer are not kept."""
        size = sum(file.stat().st_size for file in checkpoint.files)
        return cls(name or checkpoint.name, launch, checkpoint.files[0], size, checkpoint.config, kv_bytes)

    @property
    def least_bytes(self) -> int:
        """What it takes at least once it is loaded."""
        return self.file_bytes + PROCESS_BYTES + (self.kv_bytes or 0)


@dataclass(frozen=True)
class SharingSettings(Checked):
    """Checked on construction (InvalidRequest names the field)."""

    models_bytes: int | None = size(
        None,
        least=1,
        unset="what the machine or the control group has left at start",
        help="Most memory that all loaded models may take; the one that was not used for longest leaves for another.",
    )
    max_loaded: int | None = integer(None, least=1, unset="no limit", help="Most models that are loaded at once.")
    manage_models: bool = flag(
        False,
        help="Let /api/pull fetch models of the catalog and /api/delete remove them; with limited keys, only keys with "
        "admin = true. All models that were fetched are served.",
    )
    unload_after_s: float = number(
        300.0, help="Seconds without a call after which a model is unloaded; below 0 for never. A call may set its own."
    )
