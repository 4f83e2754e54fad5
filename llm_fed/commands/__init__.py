"""What the commands of `llm-fed` do beyond a single run."""
