"""The options of a model and its engine, each declared once: type, default, range and help.

`LLM` checks its arguments by this declaration. The options of commands, their environment variables and the keys of
their configuration files are made from it. The file imports no numpy, so that `--help` stays quick.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.backends.native.library import VARIANTS
from twostroke.errors import InvalidRequest
from twostroke.fields import Rule, declare, flag, integer, number, size, text
from twostroke.models.checkpoints.catalog import DEFAULT_MODEL

if TYPE_CHECKING:
    from twostroke.models.checkpoints.checkpoint import Checkpoint

BACKENDS = ("auto", "native", *(f"native-{variant}" for variant in VARIANTS), "triton", "reference")
DTYPES = ("auto", "float32", "bfloat16")
KV_DTYPES = (*DTYPES, "int8", "k8v4")
WEIGHTS = ("stored", "bf16", "int8", "int4", "int3", "int2")
PREFIX_INDEXES = ("radix", "hash", "off")  # the first two are names of one index (`kv/prefix_index.py`)
MAX_RANKS = 64
GUESSER = "mtp"  # a draft by this name is the model's own head of multi-token prediction; also its role
FIRST_LAYERS = "first-layers"  # the same for the model's own first two layers
OWN_DRAFTS = (GUESSER, FIRST_LAYERS)
KV_GROUPS = ("auto", "layers")


@dataclass(frozen=True)
class LLMOptions:
    """The arguments of `LLM`, whose docstring describes them in full."""

    model: "str | Checkpoint" = declare(
        DEFAULT_MODEL, Rule(str, "A catalog name, a GGUF file, a Hugging Face directory, or a hub id.", or_object=True)
    )
    threads: int | None = integer(None, unset="one for each core", help="CPU threads of each process.")
    tp: int = declare(
        1,
        Rule(
            int,
            "Tensor parallelism: processes on this host that compute together, with equal results.",
            least=1,
            most=MAX_RANKS,
            words=f"from 1 to {MAX_RANKS} ranks",
        ),
    )
    dtype: str = text("auto", choices=DTYPES, help="Data type of activations.")
    kv_dtype: str = text(
        "auto", choices=KV_DTYPES, help="Data type of K and V; int8 takes half of bfloat16's memory, k8v4 two fifths."
    )
    kv_groups: str = text(
        "auto",
        choices=KV_GROUPS,
        help="Which layers' K and V share pages; with layers each has its own, for techniques that drop by layer.",
    )
    weights: str = text(
        "stored", choices=WEIGHTS, help="Matrices as stored, or re-encoded on load; int3 and int2 are kept in 4 bits."
    )
    max_model_len: int | None = integer(
        None,
        least=2,
        unset="the model's context",
        help="Most tokens of a prompt and its answer; LongRoPE's factors are chosen by it.",
    )
    student: "str | Checkpoint | None" = declare(
        None,
        Rule(
            str,
            "For techniques that hand over KV: int4, MODEL or MODEL@int4, of equal KV geometry.",
            optional=True,
            or_object=True,
        ),
    )
    draft: "str | Checkpoint | None" = declare(
        None,
        Rule(
            str,
            "For speculation: a model with the same tokenizer, named as above, or mtp, the model's own head. For "
            "passages: first-layers, its own first two.",
            optional=True,
            or_object=True,
        ),
    )
    device: str = declare(
        "cpu", Rule(str, "cpu; cuda or cuda:1 for Triton's kernels; or another device of PyTorch's.", or_object=True)
    )
    backend: str = text(
        "auto", choices=BACKENDS, help="Kernels: native (C++ on CPUs), triton (GPUs), or reference (PyTorch)."
    )
    kv_bytes: int | None = size(
        None, unset="a quarter of what is free, 4 GiB at most", help="Memory for KV pages: 2GiB, 512MiB, or bytes."
    )
    kv_reserve: bool = flag(
        False, help="Take all of the pool's memory at start, so that a lack of memory shows then and not at the peak."
    )
    spare_bytes: int = size(0, help="Memory to leave free for what else the process or its container does.")
    prefix_index: str = text("radix", choices=PREFIX_INDEXES, help="Share known prefixes.")
    kv_host: int | None = size(None, unset="none", help="Ordinary memory for prefixes that the pool has no room for.")
    kv_disk: str | Path | None = declare(
        None,
        Rule(
            str,
            "A directory for KV, which outlives the process; several processes may share it.",
            least=1,
            optional=True,
            unit="directory",
            unset="none",
            or_object=True,
        ),
    )
    kv_disk_bytes: int | None = size(
        None, unset="a tenth of what is free there, 50 GiB at most", help="Most bytes that the directory may take."
    )
    kv_remote: str | None = declare(
        None,
        Rule(
            str,
            "A server for KV that speaks Redis' protocol: redis://HOST:PORT/DB, or rediss:// with TLS.",
            optional=True,
            unset="none",
        ),
    )
    kv_compress: bool = flag(
        False, help="Write KV to disk and server in a smaller form, exactly: a third less space, more processor time."
    )
    max_step_tokens: int = integer(512, least=1, help="Token budget of a step; longer prompts go in chunks.")
    max_running: int = integer(256, least=1, help="Most choices generated at once.")
    itl_ms: float | None = number(None, above=0, help="ITL objective in milliseconds, which prefill chunks must meet.")
    page_size: int = integer(16, least=1, help="KV entries per page.")
    check: bool = flag(False, help="Check the weights first: their values, and digests where they are known.")
    stream_weights: bool = flag(
        False, help="Read the model's layers from its file in every pass and keep none: for a teacher that prefills."
    )


def companion_parts(wanted: str) -> tuple[str, str]:
    """The model and the weights that a companion's name stands for: "int4" is ("", "int4"), of the main model.

    Raises InvalidRequest for weights that do not exist.
    """
    name, _, weights = wanted.rpartition("@") if "@" in wanted else (wanted, "", "stored")
    if re.fullmatch(r"stored|(bf|fp|int)\d+", name):  # int5 too, which is then refused
        name, weights = "", name
    if weights not in WEIGHTS:
        raise InvalidRequest(f"weights must be one of {', '.join(WEIGHTS)}, not {weights!r}")
    return name, weights
