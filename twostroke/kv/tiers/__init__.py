"""Where KV pages lie outside of their pool: in files on a disk, in a server that speaks Redis' protocol.

A tier may lie or vanish. So what it gives back is the exact bytes that were written, proven by a keyed digest, or
nothing, within a deadline.
"""
