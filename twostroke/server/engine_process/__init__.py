"""The engine in a process of its own, which the server starts, watches and starts again.

messages.py     what the two processes say to each other
codec.py        messages as bytes: what both sides have goes by its name, values stay where they are
hollow.py       an `LLM` without weights, which is all that routes need
host.py         the process: it opens a model, and serves one connection
launch.py       starting it, why it ended, and the next one, which has its imports done
link.py         the server's connection to one process
remote.py       the server's side: an engine that is elsewhere, with its requests, which outlive it
replicas.py     several processes of one model, and which one gets a request
in_flight.py    the server's record of each request, and what becomes of it when the process dies
rest.py         a time without a process, since nobody uses the model
watchdog.py     whether it hangs
step_note.py    which requests the step under way computes, in memory that outlives the process
"""
