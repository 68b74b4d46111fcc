"""The dialect: one row for each op with schema, eager reference, effects and whether it splits."""
