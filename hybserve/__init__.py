"""hybserve: an inference server for hybrid language models."""

__version__ = "0.1.0"
__all__ = ["__version__"]
