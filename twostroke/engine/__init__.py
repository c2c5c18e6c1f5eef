"""The engine: requests in, tokens out, all requests in one batch.

A request runs a program (strokes.py) for each of its choices. A stroke in flight is a lane (lane.py). A step lets
programs go on and admits choices (requests.py), plans how many tokens each lane enters (scheduler.py), finds pages for
them (placement.py), runs one forward pass (runner.py) and samples (flight.py); engine.py is the loop. When tokens came,
and what TTFT, ITL and TPOT are, is in timings.py.
"""
