"""The commands that run a language model, `generate`, `bench MODEL` and `perplexity`, and `fit` for its memory."""
