"""A chat whose KV value is extended turn by turn, in memory and in a file."""
