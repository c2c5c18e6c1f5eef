"""Comparison of engines in turn, in one session: the speed of a machine drifts, so only this gives valid comparisons.

The command is `python -m benchmarks.peer`.

    __main__      the command line            engines       all engines, and how each is installed
    turns         rounds, in rotating order   environments  a virtual environment for each
    client        a worker process            weights       the model in the form that an engine reads
    processes     counters of the system      worker        the other side of client, in the engine's environment
    figures       rates, medians, ratios      adapters/     a few lines per engine
    report        the table and the JSON      protocol      messages between client and worker
"""
