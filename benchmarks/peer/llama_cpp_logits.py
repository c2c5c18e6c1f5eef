"""Logits of llama.cpp with K and V in a type, in its own environment: `python -m benchmarks.peer.llama_cpp_logits JOB`.

JOB is a JSON file: the GGUF file, the type, the threads, how many rows of each text are wanted (the last ones), and the
texts as token ids; a "context" of 0 is the model's own. The logits go to JOB.npy, [texts, rows, vocab] float32. Types
of fewer bits need flash attention, which all of them get but f32. With "quantize", a type's number and a path, the file
is first quantized to that path.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import llama_cpp as api  # pyright: ignore[reportMissingImports]
import numpy as np

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}  # ggml_type


def main(path: Path) -> None:
    job = json.loads(path.read_text())
    api.llama_backend_init()
    if "quantize" in job:
        kind, target = job["quantize"]
        options = api.llama_model_quantize_default_params()
        options.ftype = kind
        if api.llama_model_quantize(job["model"].encode(), target.encode(), options):
            raise RuntimeError("llama.cpp does not quantize this model")
        job["model"] = target
    read = api.llama_model_default_params()
    read.use_extra_bufts = "quantize" not in job  # its AMX form of Q8_0 cannot multiply heads apart (MLA)
    model = api.llama_model_load_from_file(job["model"].encode(), read)
    vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    params = api.llama_context_default_params()
    params.n_ctx = job.get("context", max(map(len, job["texts"])) + 64)
    params.type_k = params.type_v = TYPES[job["type"]]
    params.flash_attn_type = int(job["type"] != "f32")
    params.n_threads = params.n_threads_batch = job["threads"]
    context = api.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama.cpp made no context")
    most, rows = int(api.llama_n_batch(context)), job["rows"]
    batch, found = api.llama_batch_init(most, 0, 1), list[np.ndarray]()
    for ids in job["texts"]:
        api.llama_memory_clear(api.llama_get_memory(context), False)
        for start in range(0, len(ids), most):
            part = ids[start : start + most]
            wanted = [start + i >= len(ids) - rows for i in range(len(part))]
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i], batch.seq_id[i][0] = token, start + i, 0
                batch.n_seq_id[i], batch.logits[i] = 1, wanted[i]
            batch.n_tokens = len(part)
            if status := api.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode returned {status}")
            found += [
                np.ctypeslib.as_array(api.llama_get_logits_ith(context, i), (vocab,)).copy()
                for i in range(len(part))
                if wanted[i]
            ]
    np.save(f"{path}.npy", np.stack(found).reshape(len(job["texts"]), rows, vocab))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
