"""Training checkpoints: model, optimizer and position of a run, saved while it continues and resumed on any ranks.

    RUN/checkpoints/best                a link to that of the lowest evaluation loss, if there is one
    RUN/checkpoints/step-00000500/
        state/                          torch.distributed.checkpoint: model.*, optimizer.*, rng.*: tensors only
        model/                          config.json and tokenizer files, for exports
        checkpoint.json                 step, tokens, settings, and the size and checksum of every file

A checkpoint is written under a temporary name and renamed once every rank's bytes are on disk.
"""
