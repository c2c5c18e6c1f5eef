"""lm_eval over HTTP (`local-completions`) against its own `hf` model in float32: the same items, one after the other.

    python -m benchmarks.lm_eval_http --model qwen2.5-coder-0.5b --limit 100

It needs an environment with lm_eval and its extras, whose interpreter is given by --python:

    python -m venv ENV && ENV/bin/pip install 'lm_eval[api]==0.4.13' torch transformers accelerate gguf
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peer.environments import environment
from benchmarks.server_process import ServerProcess
from twostroke.models.checkpoints.fetch import fetch
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.study.evaluate.tasks.arc import ArcChallenge, ArcEasy

SETS = {"arc-easy": ArcEasy.source, "arc-challenge": ArcChallenge.source}
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{query}}}}"
doc_to_target: gold
doc_to_choice: choices
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


def write_task(name: str, work: Path) -> None:
    """A task of lm_eval over a local file: each question once, its answers scored as texts."""
    documents: dict[str, Any] = {}
    with gzip.open(fetch(SETS[name]), "rt", encoding="utf-8") as stream:
        for line in stream:
            row = json.loads(line)
            documents.setdefault(row["native_id"], {key: row["doc"][key] for key in ("query", "choices", "gold")})
    file = work / f"{name}.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in documents.values()))
    (work / f"{name}.yaml").write_text(TASK.format(name=name, file=file))


def evaluate(python: Path, kind: str, model_args: str, task: str, limit: int, work: Path) -> list[dict[str, Any]]:
    """lm_eval's samples, in the order of its items."""
    out = work / kind
    command = [str(python), "-m", "lm_eval", "run", "--model", kind, "--model_args", model_args]
    command += ["--include_path", str(work), "--tasks", task, "--limit", str(limit), "--batch_size", "4"]
    command += ["--output_path", str(out), "--log_samples"]
    variables = {"OPENAI_API_KEY": "none", "HF_DATASETS_CACHE": str(work / "cache"), "PYTHONPATH": ""}
    subprocess.run(command, check=True, env=environment(variables), stdout=sys.stderr)
    [file] = out.rglob(f"samples_{task}_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(samples, key=lambda sample: sample["doc_id"])


def values(samples: list[dict[str, Any]]) -> list[float]:
    """The log-probability of every answer of every item, in nats."""
    return [float(answer[0][0]) for sample in samples for answer in sample["resps"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b", help="a GGUF model of the catalog")
    parser.add_argument("--set", default="arc-easy", choices=SETS)
    parser.add_argument("--limit", type=int, default=100, help="items")
    parser.add_argument("--python", type=Path, required=True, help="interpreter of the environment with lm_eval")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_task(asked.set, work)
        file = open_checkpoint(asked.model).files[0]
        serve = [sys.executable, "-m", "twostroke", "serve", "--model", asked.model, "--port", "{port}"]
        with ServerProcess("twostroke", serve, work) as server:
            url = f"{server.url}/v1/completions"
            ours = f"model={asked.model},base_url={url},num_concurrent=4,max_length=2048"
            http = evaluate(asked.python, "local-completions", ours, asked.set, asked.limit, work)
        theirs = f"pretrained={file.parent},gguf_file={file.name},dtype=float32,max_length=2047"
        hf = evaluate(asked.python, "hf", theirs, asked.set, asked.limit, work)
    differences = [abs(a - b) for a, b in zip(values(http), values(hf), strict=True)]
    print(f"{asked.model}, {len(http)} items of {asked.set}: over HTTP, and lm_eval's hf in float32")
    for metric in ("acc", "acc_norm"):
        shares = [sum(sample[metric] for sample in samples) / len(samples) for samples in (http, hf)]
        apart = sum(a[metric] != b[metric] for a, b in zip(http, hf, strict=True))
        print(f"  {metric:9} {shares[0]:.3f}  {shares[1]:.3f}; {apart} items are right for one of them alone")
    print(f"  log-probability of an answer: differs by {sum(differences) / len(differences):.3f} nats in the mean")


if __name__ == "__main__":
    main()
