"""LoRA adapters as PEFT has them."""
