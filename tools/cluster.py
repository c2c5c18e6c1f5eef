"""`make cluster`: Dynamo's front end, a prefill worker and a decode worker on loopback, a question, and what crossed."""

import argparse
import json
import re
import tempfile
import time
import urllib.request
from pathlib import Path

from twostroke.cluster.local import LocalCluster

QUESTION = "Explain in three sentences what a KV cache is."


def ask(url: str, model: str, question: str) -> None:
    """Print an answer as it comes."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 120,
        "temperature": 0,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began, first = time.monotonic(), None
    with urllib.request.urlopen(request, timeout=120) as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                first = first or time.monotonic()
                for choice in json.loads(line[6:]).get("choices", []):
                    print(choice["delta"].get("content") or "", end="", flush=True)
    print(f"\n\nfirst token after {(first or began) - began:.3f} s, all after {time.monotonic() - began:.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--once", action="store_true", help="end after the answer")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="twostroke-cluster-") as folder:
        with LocalCluster(Path(folder), asked.model) as cluster:
            cluster.options = ["--model", asked.model, "--threads", "1"]
            prefill, decode = cluster.add("--role", "prefill"), cluster.add("--role", "decode")
            print(f"front end at {cluster.url}/v1 (process {cluster.front_end.process.pid})")
            print(f"prefill worker: process {prefill.process.pid}; decode worker: process {decode.process.pid}")
            cluster.ready()
            print(f"\n{asked.question}\n")
            ask(cluster.url, asked.model, asked.question)
            for crossed in re.findall(r"a value of .* s\b", decode.log.read_text(errors="replace")):
                print(f"from the prefill worker to the decode worker: {crossed}")
            if not asked.once:
                print(f"\nIt goes on, until Ctrl-C: export OPENAI_BASE_URL={cluster.url}/v1")
                try:
                    cluster.front_end.process.wait()
                except KeyboardInterrupt:
                    print()


if __name__ == "__main__":
    main()
