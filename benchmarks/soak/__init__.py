"""A soak test: all kinds of client behaviour for minutes, then checks for leaks. `python -m benchmarks.soak`.

__main__    the command: start, storm, calm, verdict     sockets     malformed HTTP
requests    requests, and the allowed answers            fuzz        requests made from the OpenAPI schema
verdict     checks at the end                            vitals      counters of the system and /metrics
killing     engines that are killed (of `benchmarks.killed`)
memory      RSS and what tiers take, against budgets
"""
