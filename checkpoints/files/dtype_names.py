"""Data types by their codes in safetensors files: their names and sizes."""

FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""What parameters are stored in, as torch calls it."""
DTYPE_NAMES = {**FLOATS, "F64": "float64", "I64": "int64", "I32": "int32", "BOOL": "bool"}
"""What buffers may be stored in, too."""
DTYPE_CODES = {f"torch.{name}": code for code, name in DTYPE_NAMES.items()}
"""The code of each of these, by what torch writes it as."""
CODE_NAMES = {
    "F8_E4M3": "float8_e4m3", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0", "U8": "uint8", "I8": "int8",
}  # fmt: skip
"""What codes and their scales (see `checkpoints.files.encodings`) are stored in, a byte each."""
ALL_NAMES = {**DTYPE_NAMES, **CODE_NAMES}
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I64": 8, "I32": 4, "BOOL": 1, **dict.fromkeys(CODE_NAMES, 1)}
