"""Precis: read a long document once, ask it many times. Imports nothing, so that the API process never loads torch."""

__version__ = "0.1.0"
