"""An opened checkpoint of any file format: a config, named tensors in their stored bytes, a tokenizer.

Opening memory-maps the files and checks them. A tensor is decoded or copied only when it is read.
"""

import hashlib
import logging
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from twostroke.errors import CheckpointError, InvalidRequest
from twostroke.models.checkpoints.classes import ClassHead
from twostroke.models.checkpoints.file_digests import file_digest
from twostroke.models.checkpoints.pooling import Pooling
from twostroke.models.config import Attention, ModelConfig
from twostroke.models.formats.encode import Encoder
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.tensor_shapes import is_weight_matrix, tensor_shapes
from twostroke.system.mapped_files import MappedFile, locate_in_file

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GgufTokenizerSource:
    """All metadata of a GGUF file, as plain Python values by key.

    `tokenizer.ggml.tokens` and `.merges` are sequences of str, `.scores` is a float32 and `.token_type` an int32 array.
    """

    path: Path
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class HfTokenizerSource:
    """A Hugging Face directory, which may contain tokenizer.json, tokenizer_config.json and similar files."""

    directory: Path


@dataclass(frozen=True)
class Checkpoint:
    """A model's weights, checked when opened: every tensor that the config requires is present with the right shape.

    `stored` maps Twostroke names (see `tensor_shapes`) to tensors as the file has them. `tensor` applies `transforms`
    to some of them (llama GGUFs permute rows of Q and K; Gemma in Hugging Face form stores norms as w - 1), then
    `encoders` (see `quantize`), on each call. `generation` holds the sampling defaults that the model states
    (see `generation`), and `pooling` how hidden states become embeddings. `classes` is a head for a text's class, if
    the files have one. `guesser` opens the head of multi-token prediction, if the files have one: its embeddings and
    its head are this model's. `context` is the one that the files declare, if the config has less (`limited`).
    """

    name: str
    files: tuple[Path, ...]
    config: ModelConfig
    licence: str | None
    tokenizer_source: GgufTokenizerSource | HfTokenizerSource
    stored: Mapping[str, RawTensor] = field(repr=False)
    transforms: Mapping[str, Callable[[RawTensor], RawTensor]] = field(default_factory=dict, repr=False)
    encoders: Mapping[str, Encoder] = field(default_factory=dict, repr=False)
    generation: Mapping[str, float] = field(default_factory=dict)
    pooling: Pooling = field(default_factory=Pooling)
    classes: ClassHead | None = field(default=None, repr=False, compare=False)
    guesser: Callable[[], "Checkpoint"] | None = field(default=None, repr=False, compare=False)
    context: int | None = None

    def __post_init__(self) -> None:
        for name, shape in tensor_shapes(self.config).items():
            found = self.stored.get(name)
            if found is None:
                raise CheckpointError(f"{self.files[0]}: the tensor {name} is missing")
            if found.shape != shape:
                raise CheckpointError(f"{found.source}: shape {found.shape} where {name} must have {shape}")

    def with_layers_apart(self) -> "Checkpoint":
        """The model with pages for each layer's K and V. Raises InvalidRequest if its heads hold the same entries."""
        shapes = {one.kv_shape for one in self.config.attentions}
        if self.config.state_layers or len(shapes) != 1 or any(one.window for one in self.config.attentions):
            raise InvalidRequest(
                f"kv_groups=layers needs a model whose layers attend to all entries, with K and V of one shape: leave "
                f"it out for {self.name}"
            )
        return replace(self, config=replace(self.config, layers_apart=True))

    def limited(self, length: int | None) -> "Checkpoint":
        """The model for sequences of at most `length` tokens; None: of its whole context.

        LongRoPE's list of factors is chosen by it. Raises InvalidRequest for more than the context.
        """
        context = self.config.max_position
        if length is not None and length > context:
            raise InvalidRequest(
                f"max_model_len must be at most {context}, the context of model {self.name}, not {length}"
            )
        shorter = next((one.short[0] for one in self.config.ropes if one.short is not None), 0)
        if (length or context) > shorter > 0:
            log.warning(
                "%s: LongRoPE's long factors are used for sequences of every length; a max_model_len of %d or less "
                "takes the short ones, for which such sequences were trained",
                self.name, shorter,
            )  # fmt: skip
        return replace(self, config=self.config.limited(length or context), context=self.context or context)

    def first_layers(self, count: int) -> "Checkpoint":
        """A model of the first layers alone, for what their entries are. Raises InvalidRequest: they differ in kind."""
        layers = self.config.layers[:count]
        plain = all(isinstance(one.mixer, Attention) and one.mixer.source is None for one in layers)
        if len(layers) < count or not plain or self.config.token_inputs:
            raise InvalidRequest(f"{self.name} has no first {count} layers of plain attention that run by themselves")
        config = replace(self.config, layers=layers)
        parts = [self.stored, self.transforms, self.encoders]
        stored, transforms, encoders = ({k: part[k] for k in tensor_shapes(config) if k in part} for part in parts)
        name = f"{self.name}, first {count} layers"
        return replace(
            self, name=name, config=config, stored=stored, transforms=transforms, encoders=encoders, guesser=None
        )

    def names(self) -> set[str]:
        """The Twostroke names that `tensor` accepts."""
        return set(self.stored)

    def matrices(self) -> dict[str, RawTensor]:
        """The weight matrices by format and shape; those that `tensor` will encode have no bytes yet."""
        found = {name: tensor.outline() for name, tensor in self.stored.items() if is_weight_matrix(name, tensor.shape)}
        return found | {name: encoder.outline(found[name]) for name, encoder in self.encoders.items()}

    def tensor(self, name: str) -> RawTensor:
        """The tensor of that Twostroke name, in the layout that `ModelConfig` describes. Raises CheckpointError."""
        found = self.stored.get(name)
        if found is None:
            raise CheckpointError(f"{self.files[0]}: there is no tensor {name} in this checkpoint")
        found = found.unpack()
        for change in (self.transforms.get(name), self.encoders.get(name)):
            found = change(found) if change else found
        return found

    def release(self) -> None:
        """Frees the resident pages of the mapped files; a later access reads the file again."""
        parts = (part for tensor in self.stored.values() for part in tensor.stored())
        for file in {found[0] for part in parts if (found := locate_in_file(part.data))}:
            file.madvise(mmap.MADV_DONTNEED)

    @cached_property
    def weights_id(self) -> str:
        """Hex digest of the config and of all bytes of the weight files; tensors outside of files are hashed directly.

        The digest does not depend on where the files are. It changes if a single byte differs or matrices are
        re-encoded. Files are hashed once and their digests stored (`identity`). Raises CheckpointError if a file
        cannot be read.
        """
        config = replace(self.config, max_position=self.context or self.config.max_position)
        digest = hashlib.blake2b(repr(config).encode(), digest_size=16)
        files: dict[MappedFile, str] = {}
        for name in sorted(self.stored):
            tensor, encoder = self.stored[name], self.encoders.get(name)
            formats = f"{tensor.format} to {encoder.format}" if encoder else tensor.format
            made = "transformed" if name in self.transforms else "as stored"
            for part in tensor.stored():
                found = locate_in_file(part.data) if part.data.flags.c_contiguous else None
                if found is None:
                    where = hashlib.sha256(np.ascontiguousarray(part.data).reshape(-1).data).hexdigest()
                else:
                    file, offset = found
                    if file not in files:
                        files[file] = file_digest(file)
                    where = f"{files[file]} at {offset}"
                digest.update(f"\n{name} {formats} {tensor.shape} {made} {where}".encode())
        return digest.hexdigest()
