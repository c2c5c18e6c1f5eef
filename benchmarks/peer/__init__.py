"""Comparing engines side by side, in turn, in one session: the only comparison that means anything on a machine whose
speed drifts. `python benchmarks/peers.py` is the command.

    __main__      the command line            engines       which engines there are, and how each is installed
    turns         rounds, in rotating order   environments  a virtual environment for each
    client        a worker process            weights       the model in the form that an engine reads
    processes     what the system counted     worker        the other side of client, in the engine's environment
    figures       rates, medians, ratios      adapters/     a few lines an engine
    report        the table and the JSON      protocol      what client and worker say to each other
"""
