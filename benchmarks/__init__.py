"""Measurements, each against the plain alternative in one run. See README.md here."""
