"""Instruction data: files in many formats to tokens, sequences, and batches for each rank."""
