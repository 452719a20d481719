"""The five field reports that started the project, measured again: one module each, and the command."""
