"""The image's entry point: pick the tuned cache that fits this host, log one line, become CMD.

    pipeline-run CMD…

Standard library only, and little of it: every module imported here delays every start of every container. So no
dataclasses, no pathlib, no argparse in this room.
"""
