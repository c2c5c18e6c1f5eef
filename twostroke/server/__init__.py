"""An OpenAI-compatible HTTP server: one thread owns the engine, an event loop serves the clients.

Needs the extra `serve` (FastAPI, uvicorn, prometheus_client, llguidance); nothing else imports this package.
"""
