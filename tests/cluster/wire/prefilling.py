"""A process that prefills a prompt and offers its value.

Run as `python -m tests.cluster.wire.prefilling MODEL TRANSPORT PROMPT`.

It prints the handle, waits for a line on stdin before each step of its prefill, and then for the end of stdin.
"""

import json
import sys

from twostroke.api.llm import LLM
from twostroke.cluster.wire.sender import Sender
from twostroke.cluster.wire.split_programs import prefill_program
from twostroke.cluster.wire.transport import open_transport
from twostroke.engine.request import Request
from twostroke.methods import Plain
from twostroke.methods.method import Prompt
from twostroke.sampling.params import SamplingParams


def main(model: str, kind: str, tokens: str) -> None:
    llm = LLM(model, weights="bf16", kv_bytes=4 << 20, threads=1, max_step_tokens=16)
    transport = open_transport(kind, llm.pool)  # pyright: ignore[reportArgumentType]
    sender = Sender(llm.pool, llm.model.id, secret="a secret of the tests", transport=transport)
    offer, prompt = sender.offer(), Prompt(json.loads(tokens), llm.tokenizer)
    print(json.dumps(offer.handle.to_json()), flush=True)
    request = Request(lambda: prefill_program(Plain(), prompt, offer), SamplingParams(), llm.tokenizer)
    llm.engine.submit(request)
    for _ in sys.stdin:
        llm.engine.step()
        print(json.dumps({"done": request.done}), flush=True)
    llm.engine.cancel(request)
    request.raise_error()
    sender.close()
    transport.close()
    assert sender.num_offers == 0
    del request
    llm.model.index.clear()  # pyright: ignore[reportOptionalMemberAccess]
    print(json.dumps({"used": llm.pool.num_used}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
