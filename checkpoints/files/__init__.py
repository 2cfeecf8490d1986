"""Tensor data and files on disk, of any form."""
