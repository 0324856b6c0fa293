"""Replaces the operations between the products of a decoder layer by operators that take one dispatch each."""
