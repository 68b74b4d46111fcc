"""From chat messages to the text of a prompt: the message normaliser and the chat template. Imports no torch."""
