"""The kinds of model source, one module each, and how checkpoint names become weight recipes."""
