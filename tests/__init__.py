"""The tests, by the rooms of the package; what they share is in `support`."""
