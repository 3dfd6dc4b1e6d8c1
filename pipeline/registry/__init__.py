"""A small client for OCI registries. It needs Python and requests, and nothing of Docker."""
