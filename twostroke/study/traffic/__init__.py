"""Who asks what, and when: what a load generator sends, a planner counts and a simulator serves.

requests           when they come, and their prompts, in pieces
workload_sampler   requests that are drawn
trace              requests read from a file of somebody's trace
objectives         what users are promised
"""
