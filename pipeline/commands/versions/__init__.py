"""`pipeline versions …`."""
