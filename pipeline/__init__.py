"""Make an inference server's first start once, at image build, and bake the caches into the last layers."""

__version__ = "0.1.0"
