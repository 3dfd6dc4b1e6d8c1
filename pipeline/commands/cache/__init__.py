"""`pipeline cache …`."""
