"""Facts of FlashInfer, by version: what planner, tuner, cache and docs must agree on. Standard library only.

`features` says what changed between versions, `gpus` which GPUs and architectures there are, `ops` how ops and
backends are called, `moe_keys` which MoE layers one cache file cannot keep apart, `leader` what a leader cannot tune.
"""
