"""The KV cache as a value (cache.py), and what it rests on.

Pages are in a pool (pool.py), a writer extends a value (writer.py), provenance says which entries are canonical
(provenance.py), prefix indexes find them again (radix.py, hashed.py), and a value can be a file (storage.py).
"""
