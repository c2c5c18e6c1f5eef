"""A load generator for any server that takes token ids at /v1/completions. Imports no torch: it runs beside the server.

arrivals      when requests come            target    the server: what it serves, and whether it is fit
lengths       how long they are             client    one request, and when each of its tokens came
workload      their prompts                 drive     all of them, in open or closed loop
figures       from times to a summary       files     what is kept: JSON lines, summary, plot
"""
