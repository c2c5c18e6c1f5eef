"""A worker of NVIDIA Dynamo: requests come from its front end as token ids, and tokens go back.

Discovery, routing, the front end and retries are Dynamo's. The files that import it are `worker` and `local`:

    asked.py     what the front end asks for, as a request of the engine
    link.py      how many of a retry's tokens belong to the answer
    turns.py     whose tokens they are, of several choices
    sources.py   where the prompt's KV comes from then
    chunks.py    tokens as the front end takes them
    events.py    what enters and leaves the prefix index, for the router
    stored.py    what comes to a disk and leaves it
    feed.py      the way of both to Dynamo
    card.py      the directory by which the front end knows the model
    worker.py    the worker's life: start, requests, end
    local.py     a cluster on one machine
"""
