"""Files of checkpoints: safetensors and GGUF."""
