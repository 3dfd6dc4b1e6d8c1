"""Tune FlashInfer kernels once, at image build, and bake the verified cache into the last layer."""
