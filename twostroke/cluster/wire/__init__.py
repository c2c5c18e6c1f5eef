"""Values that go to another process: leases, transfers over NIXL or TCP, and the programs on both sides."""
