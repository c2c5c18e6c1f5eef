"""The engine on a virtual clock, with a cost model in place of kernels. The scheduler is the engine's own.

virtual_time                 clocks that stand still, and planned events
null_objects                 memory, pool and tokenizer without contents
simulated_model, step_costs  a compiled pass that takes time and computes nothing; how long a step takes
engine_setup                 the engine over these, and the HTTP before it; `model_timing` times it on this machine
simulated_request, worker    a request as its user sees it, and its tokens; one engine on its own clock
fleet, kv_transfers          workers, links and faults; KV on its way between workers
simulation, figures          a fleet under traffic; percentiles, rates, and a timeline
"""
