"""The 4-bit checkpoint formats, one file per producer."""
