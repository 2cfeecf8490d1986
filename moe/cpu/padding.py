"""Padded lengths of the batches in matmuls on a CPU."""


def padded_rows(num_rows: int) -> int:
    """The number of rows to which `moe.cpu.matmul.pad_rows` pads `num_rows`."""
    if num_rows < 32:
        return num_rows
    step = max(32, 2 ** (num_rows.bit_length() - 6))
    return -(-num_rows // step) * step
