"""One file per engine, with the code that makes it answer a job. Each runs only in that engine's environment.

No file has the name of a package that it imports, since type checkers would confuse the two.
"""
