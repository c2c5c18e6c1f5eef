"""`make cluster`: Dynamo's front end, a prefill and a decode worker on loopback, a question, and what crossed."""

import argparse
import json
import re
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from benchmarks.local_cluster import LocalCluster

QUESTION = "Explain in three sentences what a KV cache is."
KILL_AT = 25  # tokens


def ask(url: str, model: str, question: str, at: int = 0, act: Callable[[str], None] = lambda _: None) -> str:
    """Print an answer as it comes, and return it. After `at` tokens, `act` is called with the completion's id."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 120,
        "temperature": 0.7,
        "seed": 1,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began, first, pieces = time.monotonic(), 0.0, list[str]()
    with urllib.request.urlopen(request, timeout=120) as lines:
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            first = first or time.monotonic()
            pieces += [choice["delta"].get("content") or "" for choice in event["choices"]]
            print(pieces[-1], end="", flush=True)
            if len(pieces) == at:
                act(event["id"])
    print(f"\n\n(first token after {first - began:.2f} s, all after {time.monotonic() - began:.2f} s)")
    return "".join(pieces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--kill", action="store_true", help="ask again, and kill the decode worker in mid-stream")
    parser.add_argument("--once", action="store_true", help="end after the answer")
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="twostroke-cluster-") as folder,
        LocalCluster(Path(folder), asked.model) as cluster,
    ):
        cluster.options = ["--model", asked.model, "--threads", "1"]
        prefill = cluster.add("--role", "prefill")
        decode = [cluster.add("--role", "decode") for _ in range(2 if asked.kill else 1)]
        print(f"front end: process {cluster.front_end.process.pid}, {cluster.url}/v1")
        print(f"prefill worker: process {prefill.process.pid}")
        print(f"decode worker: process {', '.join(str(one.process.pid) for one in decode)}")
        cluster.ready()
        print(f"\n{asked.question}\n")
        answer = ask(cluster.url, asked.model, asked.question)
        for worker in decode:
            for crossed in re.findall(r"a value of .* s\b", worker.log.read_text(errors="replace")):
                print(f"crossed: {crossed}")
        if asked.kill:

            def kill(id: str) -> None:
                worker = next(one for one in decode if id.partition("-")[2] in one.log.read_text(errors="replace"))
                worker.kill()
                print(f" [kill -9 {worker.process.pid}] ", end="", flush=True)

            print(f"\n{asked.question}\n")
            again = ask(cluster.url, asked.model, asked.question, KILL_AT, kill)
            print("the same tokens" if again == answer else "other tokens")
            for worker in decode:
                for chosen in re.findall(r"taken over with .*", worker.log.read_text(errors="replace")):
                    print(chosen)
        if not asked.once:
            print(f"\nIt goes on, until Ctrl-C: export OPENAI_BASE_URL={cluster.url}/v1")
            try:
                cluster.front_end.process.wait()
            except KeyboardInterrupt:
                print()


if __name__ == "__main__":
    main()
