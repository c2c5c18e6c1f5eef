"""A worker of NVIDIA Dynamo: requests come from its front end as token ids, and tokens go back.

Discovery, routing, the front end and retries are Dynamo's. The files that import it are `worker` and `local`:

    asked.py     what the front end asks for, as a request of the engine
    link.py      how many of a retry's tokens belong to the answer
    chunks.py    tokens as the front end takes them
    events.py    what enters and leaves the prefix index, for the router
    card.py      the directory by which the front end knows the model
    worker.py    the worker's life: start, requests, end
    local.py     a cluster on one machine
"""
