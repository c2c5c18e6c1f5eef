"""`python -m benchmarks.peer.dequantize IN OUT`: GGUF to a bfloat16 Hugging Face directory, for engines without GGUF.

Run in the transformers environment. The weights are the dequantized values of the GGUF, so that every engine computes
the same model, apart from the rounding of its own format.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def dequantize(gguf: Path, directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.config.__dict__.pop("quantization_config", None)  # the written file is not quantized
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)


if __name__ == "__main__":
    dequantize(Path(sys.argv[1]), Path(sys.argv[2]))
