"""Command line, OpenAI API and metrics: the only room that parses flags or reads the environment."""
