"""Who asks what, and when: what a load generator sends, a planner counts and a simulator serves.

arrivals      when requests come            workload      requests that are drawn
lengths       how long they are             trace         requests read from a file, in Mooncake's format
requests      their prompts, in pieces      objectives    what users are promised
"""
