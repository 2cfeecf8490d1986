"""Where tensors live: topology, mesh, expert placement, FSDP2, activation checkpointing, clipping."""
