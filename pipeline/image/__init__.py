"""From a plan to a verified image: base, wheels, build, tune, bake, verify, report."""
