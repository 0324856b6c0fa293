"""The tests, in folders like those of the package. Shared helpers are in `support`."""
