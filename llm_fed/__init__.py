"""llm_fed: federated LoRA fine-tuning with personal models by merging."""
