"""Replaces the operations between the matrix products of a decoder layer by operators with one dispatch each."""
