"""The KV cache as a value (cache.py), and what it rests on.

Pages are named, counted and placed (pages.py), and read and written (pool.py). A writer extends a value (writer.py),
provenance says which entries are canonical (provenance.py), prefix indexes find them again (radix.py, hashed.py), and a
value can be a stream of bytes (stream.py).
"""
