"""A real server's own start as a warm-up: vLLM or SGLang, from config.json and dummy weights.

words       what a deployment says: arguments and environment, secrets apart
adapters    what a server is: its command, its cache directories, its log, what enters its hashes
kinds       kinds of caches, known by where they lie
starts      what is started, and what was seen of it
watch       one start after another, inside the container: files, processes, log, requests
collect     what the starts wrote → caches by kind, as they will lie in the image
judge       seconds by phase; a baked start against the last warm one, kind by kind
manifest    what an image says of its warm-up; a deployment's words against those
model       the model's config files
containers  the starts in containers of a Docker Engine
producer    warm up and prove, for the road of `pipeline build`
in_place    the same without a Docker Engine, in a container that a cluster started
"""
