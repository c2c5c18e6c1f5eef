"""Requests that schemathesis makes from the server's own OpenAPI schema, valid and not: a process of its own.

    python -m benchmarks.soak.fuzz URL SEED

It runs until SIGTERM. The last line on stdout is JSON: how many requests were made, and which were answered with a
server error that is not documented.
"""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from itertools import count, product
from typing import Any

import requests
import schemathesis  # pyright: ignore[reportMissingImports]
from hypothesis import HealthCheck, Phase, given, seed, settings

from benchmarks.soak.requests import documented

READ_S = 2.0  # for an answer; then the client goes, which is a test as well
KEPT = 10  # failures that are told in full
BOUNDS = settings(
    max_examples=20,  # of an operation in a round
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large),
)


def main(url: str, first_seed: int) -> None:
    statuses, failures, told = Counter[int](), list[str](), set[str]()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # hypothesis would take SystemExit for a finding
    schema: Any = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]

    def send(case: Any) -> None:
        try:
            answer = case.call(base_url=url, timeout=READ_S)
        except requests.RequestException:  # it took too long, or is nothing that can be sent
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
            except Exception as error:  # of the generator: some operations have nothing to make wrong
                told.add(f"{operation.label}, {mode.value}: {type(error).__name__} {error}")
    except KeyboardInterrupt:
        facts = {"requests": sum(statuses.values()), "statuses": dict(statuses), "left_out": sorted(told)}
        print(json.dumps(facts | {"failures": failures[:KEPT], "failed": len(failures)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
