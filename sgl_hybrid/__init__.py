"""Memory organizations for hybrid attention+SSM models in stock SGLang."""

__version__ = "0.1.0"
