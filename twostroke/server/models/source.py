"""What a model of several is opened from, and what is known of it before its engine is there."""

from dataclasses import dataclass
from pathlib import Path

from twostroke.engine.memory_budget import PROCESS_BYTES
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.config import ModelConfig
from twostroke.server.engine_process.launch import Launch


@dataclass(frozen=True)
class ModelSource:
    """One model."""

    name: str  # what clients call it
    launch: Launch  # starts its engine's process
    path: Path  # its file or directory
    file_bytes: int  # what its files take
    config: ModelConfig  # what it is made of
    kv_bytes: int | None = None  # what its pool takes; None if that is chosen when it is opened

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
