"""llama.cpp behind `/v1/embeddings`: texts of a call share batches, as in its own server. Run in its environment."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

import llama_cpp as api  # pyright: ignore[reportMissingImports]

ROWS = 2048  # tokens of a batch


def serve(model: str, port: int, threads: int) -> None:
    """Serve a GGUF file at a port of the loopback interface; the last token's hidden state is a text's embedding."""
    llama = api.Llama(
        model, embedding=True, pooling_type=api.LLAMA_POOLING_TYPE_LAST, n_ctx=ROWS, n_batch=ROWS, n_ubatch=ROWS,
        n_threads=threads, n_threads_batch=threads, verbose=False,
    )  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({"status": "ok"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            made, count = llama.embed(body["input"], normalize=True, return_count=True)
            data = [{"index": i, "embedding": one} for i, one in enumerate(made)]
            self._answer({"data": data, "usage": {"prompt_tokens": count}})

        def _answer(self, content: object) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
