"""A worker of NVIDIA Dynamo: requests come from its front end as token ids, and tokens go back.

Discovery, routing, the front end and retries are Dynamo's. Only `worker` and `registration`
import Dynamo.

    dynamo_request.py   a front end's request, parsed into a request of the engine
    migration.py        how many of a migrated request's tokens belong to the answer
    interleaving.py     which choice each of them belongs to
    kv_sources.py       where the prompt's KV comes from after a migration
    registration.py     whether this worker is still found, and others are like it
    chunks.py           tokens in the form that the front end takes
    router_events.py    KV events of the prefix index and of the disk tier, for the router
    event_socket.py     the socket at which Dynamo reads them
    model_card.py       the directory by which the front end knows the model
    roles.py            prefill, decode, or both
    worker.py           the worker's life: start, requests, end
    worker_metrics.py   its own Prometheus metrics
    environment.py      the environment variables of Dynamo's processes
"""
