"""A load generator for any server that takes token ids at /v1/completions. Imports no torch: it runs beside the server.

target    the server: what it serves, and whether it is fit
client    one request, and when each of its tokens came; all of them, in open or closed loop
figures   from times to a summary, and what is kept: JSON lines, summary, plot
"""
