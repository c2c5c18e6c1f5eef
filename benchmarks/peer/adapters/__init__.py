"""One file an engine: the few lines that make it answer a job. Each runs in that engine's environment only.

None has the name of a package that it imports, or a type checker takes it for that package.
"""
