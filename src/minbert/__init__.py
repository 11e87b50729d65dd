"""One encoder that understands sentences for many tasks at once."""

__version__ = "0.1.0"
