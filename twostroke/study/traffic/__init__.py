"""Who asks what, and when: what a load generator sends, a planner counts and a simulator serves.

arrivals      when requests come              workload_sampler   requests that are drawn
requests      their prompts, in pieces        trace              requests read from a file of somebody's trace
objectives    what users are promised
"""
