"""Bundled models: one JSON file each, with facts of its public config.json. Data only; `pipeline.planning` reads it."""
