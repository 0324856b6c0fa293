"""Replaces what stands between the products of a decoder layer by operators of one dispatch each."""
