"""The bases and what is trained of them: language models, image models, adapters, whole models."""
