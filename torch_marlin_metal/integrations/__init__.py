"""What makes other packages use the operators; each integration is imported by name."""
