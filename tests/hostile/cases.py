"""How many cases each campaign runs at least: generated ones (HOSTILE_CASES multiplies them), and ones made by hand."""

CASES = {
    "safetensors_files": (200, 60),
    "index_files": (150, 20),
    "config_files": (300, 500),
    "manifests": (200, 120),
    "markers": (150, 180),
    "damaged_shards": (150, 0),
    "damaged_states": (100, 0),
    "forged_states": (100, 30),
    "names_in_tables": (0, 57),
    "links": (0, 12),
    "hub_cache": (0, 2),
    "things_that_are_no_files": (0, 25),
    "code_beside_weights": (0, 27),
    "yaml_files": (200, 250),
    "model_names": (0, 12),
    "plans": (150, 120),
    "data_files": (60, 50),
    "data_rows": (600, 0),
    "tokenizer_files": (200, 50),
    "chat_templates": (0, 60),
}
