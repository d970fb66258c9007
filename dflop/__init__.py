"""Plan and run multimodal-LLM training around the data."""
