"""The planner's view of Apple GPUs: their figures, plans, profiles and tuning."""
