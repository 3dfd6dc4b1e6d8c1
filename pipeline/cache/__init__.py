"""Cache files: read, judged, walked, explained. Standard library only; imports only `pipeline.contract`.

bytes ─strictjson─▶ values ─read─▶ CacheFile ─judge─▶ Judgement     one file against one environment
directory or archive ─tree/archive─▶ Stored ─integrity─▶ Findings     a baked key against its own manifest
"""
