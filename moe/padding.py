"""How long the batches are that products on a CPU are given."""


def padded_rows(num_rows: int) -> int:
    """To how many rows `moe.matmul.pad_rows` pads so many."""
    if num_rows < 32:
        return num_rows
    step = max(32, 2 ** (num_rows.bit_length() - 6))
    return -(-num_rows // step) * step
