"""Floor 4: measures what a step costs on this machine, and compares ways of decoding on it."""
