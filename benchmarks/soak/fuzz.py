"""Valid and invalid requests that schemathesis makes from the server's OpenAPI schema, as a separate process.

    python -m benchmarks.soak.fuzz URL SEED

It runs until SIGTERM. The last line on stdout is JSON: the number of requests, and those that were answered with an
undocumented server error.
"""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from itertools import count, product
from types import FrameType
from typing import Any

import requests
import schemathesis  # pyright: ignore[reportMissingImports]
from hypothesis import HealthCheck, Phase, given, seed, settings

from benchmarks.soak.requests import documented

READ_S = 2.0  # time for an answer; then the client disconnects, which is also tested
KEPT = 10  # failures that are reported in full
BOUNDS = settings(
    max_examples=20,  # per operation and round
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large),
)


def main(url: str, first_seed: int) -> None:
    statuses, failures, told = Counter[int](), list[str](), set[str]()
    over = False

    def end(_: int, __: FrameType | None) -> None:
        nonlocal over
        over = True
        raise KeyboardInterrupt  # hypothesis would report SystemExit as a failure

    signal.signal(signal.SIGTERM, end)
    schema: Any = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]

    def send(case: Any) -> None:
        if over:  # a callback of the garbage collector has swallowed the first
            raise KeyboardInterrupt
        try:
            answer = case.call(base_url=url, timeout=READ_S)
        except requests.RequestException:  # it took too long, or cannot be sent
            statuses[0] += 1
            return
        statuses[answer.status_code] += 1
        if not documented(answer.status_code, answer.content):
            failures.append(f"{answer.status_code} {answer.content[:200]!r} to {case.as_curl_command()[:800]}")

    one_round = list(product(operations, schemathesis.GenerationMode))
    try:
        for number, (operation, mode) in ((number, one) for number in count(first_seed) for one in one_round):
            try:
                BOUNDS(seed(number)(given(operation.as_strategy(generation_mode=mode))(send)))()
            except Exception as error:  # of the generator: some operations have no invalid requests
                told.add(f"{operation.label}, {mode.value}: {type(error).__name__} {error}")
    except KeyboardInterrupt:
        facts = {"requests": sum(statuses.values()), "statuses": dict(statuses), "left_out": sorted(told)}
        print(json.dumps(facts | {"failures": failures[:KEPT], "failed": len(failures)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
