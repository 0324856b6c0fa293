"""An Apple GPU as the planner sees it: its figures, its plans, profiles and tuning."""
