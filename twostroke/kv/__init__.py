"""The KV cache as a value (cache.py), and the modules below it.

pages.py counts references to pages and places them; pool.py reads and writes them. A writer extends a value
(writer.py), provenance says which entries are canonical (provenance.py), prefix indexes find them again (radix.py,
hashed.py), and values are written to and read from streams of bytes (stream.py).
"""
