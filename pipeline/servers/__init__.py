"""A real server's own start as a warm-up: vLLM or SGLang, from config.json and dummy weights.

words       what a deployment says: arguments and environment, secrets apart
adapter     what a server is: its command, its cache directories, its log, what enters its hashes (vllm, sglang)
kinds       kinds of caches, told apart by where they lie
watch       one start after another, inside the container: files, processes, log, requests
phases      a log's seconds by phase, and what it says of hits and misses
collect     what the starts wrote → caches by kind, as they will lie in the image
judge       a baked start against the last warm one, kind by kind
containers  the same starts in containers of a Docker Engine
producer    warm up and prove, for the road of `pipeline build`
in_place    the same without a Docker Engine, in a container that a cluster started
explain     a deployment's words against those that were baked
"""
