"""The schedules compared over simulated trials."""
