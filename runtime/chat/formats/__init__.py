"""The forms in which models write tool calls: one file a form."""
