"""Floor 0: types, configuration, registry, clock, errors. Imports nothing of the program."""
