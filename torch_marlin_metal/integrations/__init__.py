"""Integrations that make other packages use the operators; each is imported by name."""
