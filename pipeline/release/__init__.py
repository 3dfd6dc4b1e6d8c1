"""Release: tuned images, caches and what proves them, in a registry. Runs on the host."""
