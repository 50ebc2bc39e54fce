"""Floor 6: the OpenAI surface as pure asyncio: schemas, parsing, responses, resuming. Runs without ray."""
