"""The tuner, which runs inside the image: real ranks, the real FlashInfer AutoTuner, one watchdog outside them.

    python -m pipeline.tune plan.json OUT       supervises the ranks that tune (standard library only)
    python -m pipeline.tune.replay              supervises as many fresh ranks that must tune nothing
    python -m pipeline.tune.record              prints the environment record

torch and FlashInfer are imported by the ranks and by `record`, never by a supervisor.
"""
