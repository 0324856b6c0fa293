"""The checkpoint formats, one file per producer."""
