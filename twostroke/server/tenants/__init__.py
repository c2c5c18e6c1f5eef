"""Who calls the server: keys with names, what each may use, and what it has used.

key_file      what a file of keys says            api_keys      the accepted keys, read again when the file changes
tenant        a name's limits and use, and one call of it
"""
