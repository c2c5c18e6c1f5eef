"""The engine: requests in, tokens out, all requests in one batch.

A request runs a program (strokes.py) for each of its choices. A stroke in flight is a lane (lane.py). A step resumes
programs and admits choices (request_manager.py), plans how many tokens each lane enters (scheduler.py), finds pages for
them (placement.py), runs one forward pass (step.py) and samples (step_in_flight.py); engine.py is the loop. The states
of a choice are in choice_state.py; times of tokens, and the definitions of TTFT, ITL and TPOT, in timings.py.
"""
