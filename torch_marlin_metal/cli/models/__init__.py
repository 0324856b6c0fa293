"""The commands that run a language model, or say whether one fits: `generate`, `bench MODEL`, `perplexity`, `fit`."""
