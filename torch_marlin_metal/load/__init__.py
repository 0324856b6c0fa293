"""The one loader: a plan of what a checkpoint gives to a model, and the two steps that carry it out."""
