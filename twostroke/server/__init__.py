"""An HTTP server: one thread owns the engine, an event loop serves the clients.

The way of a call that generates text, and the words for it:

    body          what a client sends, checked against a schema                     openai/schemas
    call options  how it is to be served: choices, stream, priority, deadline       active_call.py
    request       what the engine runs, one for each prompt of the body             engine_requests.py
    active call   the call in flight: its places in the queue and its requests      active_call.py
    update        what one step did for one request, from the engine's thread       engine/engine_thread.py
    answer        takes the tokens of all updates and writes them as the API does   answer.py, openai/answers

A route (openai/routes) reads a body and calls `generate` (generate.py), which leads it along this way:

    active_call = engine.reserve_call(...)  ->  prepared = prepare()  ->  engine.submit(active_call, prepared.requests)
                ->  active_call.updates()  ->  answer  ->  JSON or a stream of events (http/responses.py)

`AsyncEngine` (async_engine.py) is the engine as the event loop sees it; `EngineThread` runs its steps.

An API is a folder: `openai`, `anthropic`, `ollama`. It has its schemas, its answers and its routes. The others
translate a conversation into OpenAI's (openai/prepare_chat.py) and read what comes back with a `ChoiceParser` (tools).
An error is written in the form of the API that was called (error_responses.py). The other folders are shared: `http`
is around the routes, `body_validation` runs long bodies through the routes in another process first, `tools` is about
calls, `json_schema` rewrites schemas for the grammar library, and `observability` is for the operator.

Needs the extra `serve` (FastAPI, uvicorn, prometheus_client, llguidance). Only `twostroke serve` imports this package.
"""
