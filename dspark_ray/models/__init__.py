"""Floor 2: layers, targets, drafters, weights, tokenizer and where models come from."""
