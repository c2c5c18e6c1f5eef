"""The KV cache as a value (cache.py), and the modules below it.

A value is an entry table (entries.py) over pages of a pool (pool.py). The pool is composed of reference counts and
frames (pages.py), copies outside of it (page_copies.py) and releases (releases.py). Over it work the contents of pages
(page_contents.py), their moves between tiers (swap_in.py, tier_moves.py), entries at other positions or in another
format (other_entries.py), other entries for each head (entries_by_head.py), and a writer that extends a value
(writer.py).
Provenance says which entries are canonical (provenance.py), and prefix indexes find them again (prefix_index.py,
over page_tree.py) and evict them (evictable_pages.py). Values are saved as streams of bytes (stream.py).
"""
