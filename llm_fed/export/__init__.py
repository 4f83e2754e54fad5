"""Personal models as files: PEFT folders, image models, their cards, loading them, the Hub."""
