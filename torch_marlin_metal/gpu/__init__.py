"""The planner's data about Apple GPUs: figures, plans, profiles and tuning."""
