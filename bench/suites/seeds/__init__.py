"""The five field reports the project was made from, measured again: one module each, and the command."""
