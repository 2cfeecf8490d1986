"""Linear layers beside those of transformers: held transposed, in fp8, or quantized."""
