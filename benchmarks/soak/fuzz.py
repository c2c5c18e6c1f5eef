"""Requests that schemathesis makes from the server's own OpenAPI schema, valid and not: a process of its own.

    python -m benchmarks.soak.fuzz URL SECONDS SEED

The last line on stdout is JSON: how many requests were made, and those answered with a server error that is not
documented.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from typing import Any

import requests
import schemathesis  # pyright: ignore[reportMissingImports]
from hypothesis import HealthCheck, Phase, given, seed, settings

from benchmarks.soak.requests import documented

READ_S = 10.0  # for an answer; then the client goes, which is a test as well
EXAMPLES = 20  # of an operation in a round
KEPT = 10  # failures that are told in full


def main(url: str, seconds: float, first_seed: int) -> None:
    end, statuses, failures = time.monotonic() + seconds, Counter[int](), list[str]()
    schema: Any = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]

    def send(case: Any) -> None:
        if time.monotonic() > end:
            return
        try:
            answer = case.call(base_url=url, timeout=READ_S)
        except requests.RequestException:  # it took too long, or is nothing that can be sent
            statuses[0] += 1
            return
        statuses[answer.status_code] += 1
        if not documented(answer.status_code, answer.content):
            failures.append(f"{answer.status_code} {answer.content[:200]!r} to {case.as_curl_command()[:800]}")

    round_number = 0
    while time.monotonic() < end:
        for operation in operations:
            for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
                check = seed(first_seed + round_number)(given(operation.as_strategy(generation_mode=mode))(send))
                bounds: Any = settings(
                    max_examples=EXAMPLES,
                    deadline=None,
                    database=None,
                    phases=[Phase.generate],
                    suppress_health_check=(
                        HealthCheck.too_slow,
                        HealthCheck.filter_too_much,
                        HealthCheck.data_too_large,
                    ),
                )
                try:
                    bounds(check)()
                except Exception as error:  # of the generator: some operations have nothing to make wrong
                    print(f"{operation.label}: {type(error).__name__} {error}", file=sys.stderr)
        round_number += 1
    facts = {"requests": sum(statuses.values()), "statuses": dict(statuses), "failures": failures[:KEPT]}
    print(json.dumps(facts | {"failed": len(failures), "rounds": round_number}))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
