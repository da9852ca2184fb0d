"""The plain messages and keys that service and workers share. No torch."""
