"""The endpoints, one file per kind."""
