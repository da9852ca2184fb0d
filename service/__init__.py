"""The HTTP API and the command line. Never imports torch."""
