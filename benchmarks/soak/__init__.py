"""A server under everything that clients do, for minutes; then nothing may be left of it: `python -m benchmarks.soak`.

__main__    the command: start, storm, calm, verdict     sockets     bytes that are hardly HTTP
requests    what clients ask, and what they may hear     fuzz        requests made from the OpenAPI schema
verdict     what must hold at the end                    vitals      what the system and /metrics count
"""
