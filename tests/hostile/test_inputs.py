"""Broken and hostile files: one table of who reads them and how they are damaged, one of what is said."""

import json
import os
import pickle
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from hypothesis import strategies as st
from safetensors.torch import load, save
from transformers import CONFIG_MAPPING

from expertmesh.checkpoints.ep_shards.manifest import MANIFEST
from expertmesh.checkpoints.files.checksums import file_checksum, seal
from expertmesh.checkpoints.training_state.marker import MARKER
from expertmesh.training.config.train_config import TrainConfig, parse_config
from tests.hostile.contents import CONTENTS, ROWS
from tests.hostile.harness import Refused, Watch, fuzz
from tests.hostile.models import (
    FAMILIES,
    Tensors,
    computed,
    described,
    given_template,
    in_file,
    loaded,
    own_template,
    pairs,
    planned,
    records,
    resumed,
    run_config,
    same_bits,
    samples,
    tokens,
)
from tests.hostile.mutations import (
    BROKEN_TEXTS,
    HOSTILE_VALUES,
    broken_texts,
    changed_bytes,
    changed_document,
    changed_weights,
    dumped,
    header_of,
    hostile_values,
    with_header,
)

INDEX = "model.safetensors.index.json"
Damage = Callable[[bytes], Iterable[tuple[str, bytes]]]
"""From a file as it was: what was done, and what it then holds."""


class Input(NamedTuple):
    """A file that is damaged.

    Attributes:
        origin: the directory that it lies in, of `ORIGINS`.
        file: its path in there.
        read: what a user's command does with the directory.
        right: which of RIGHT a damaged one must be to be taken.
        drawn, num_drawn: ways to damage it at random, and how many are tried.
        by_hand: others.
        said: one of these is in every error; {path} is the directory.
        prepare: (directory, file): what whoever damages it does beside.
        writes: whether reading takes files of its own, in a cache.
    """

    origin: str
    file: str
    read: Callable[[Path], Any]
    right: str
    drawn: Callable[[bytes], st.SearchStrategy[bytes]]
    num_drawn: int
    by_hand: tuple[Damage, ...] = ()
    said: tuple[str, ...] = ("{path}",)
    prepare: Callable[[Path, str], None] = lambda path, file: None
    writes: bool = False


def damaged(watch: Watch, name: str, origin: Path) -> None:
    """Every damage of an input: it is refused with a name, or right."""
    row, path = INPUTS[name], watch.directory / "input"
    shutil.copytree(origin, path)
    if row.writes:
        watch.writable.append(str(watch.directory / "cache"))
    file, said = path / row.file, [text.format(path=path) for text in row.said]
    original, expected = file.read_bytes(), row.read(path)

    def attempt(case: str, content: bytes) -> None:
        file.write_bytes(content)
        row.prepare(path, row.file)
        found = watch.attempt(f"{row.file}: {case}", lambda: row.read(path), *said)
        assert isinstance(found, Refused) or RIGHT[row.right](found, expected, content, original), (
            f"{case}: gave {found!r:.500}"
        )

    attempt("as it was", original)
    for damage in row.by_hand:
        for case, content in damage(original):
            attempt(case, content)
    fuzz(row.num_drawn, row.drawn(original), lambda content: attempt(f"{content!r:.2000}", content))


# ---- what may have been taken ----


def as_safetensors_reads(found: Tensors, _: Tensors, content: bytes, __: bytes) -> bool:
    Path("found").mkdir(exist_ok=True)
    Path("found/model.safetensors").write_bytes(content)
    return same_bits(found, in_file(Path("found")))


def turned_as_said(found: Tensors, expected: Tensors, content: bytes, original: bytes) -> bool:
    """A square matrix is the other way round if a table says so: whoever can seal it can also write weights."""

    def transposed(table: Any) -> set[str]:
        entries = [entry["parameter"] for entry in table.get("tensors", []) if entry.get("transposed")]
        return {*entries, *table.get("transposed", [])}

    turned = transposed(json.loads(content)) ^ transposed(json.loads(original))
    return same_bits(found, {name: weight.t() if name in turned else weight for name, weight in expected.items()})


def survives(config: TrainConfig, *_: Any) -> bool:
    """It is read back from the config.yaml of its run, but for what only the command line can give, as --dataset=-1."""
    if any(str(item).startswith("-") for value in asdict(config).values() if isinstance(value, list) for item in value):
        return True
    config.save(Path("again.yaml"))
    return parse_config(["--config", "again.yaml"]) == config


RIGHT: dict[str, Callable[..., Any]] = {
    # by name, of (found, found before, the file's content, that before): whether a damaged file may be taken so
    "anything": lambda *_: True,
    "unchanged": lambda found, before, content, original: content == original,
    "same": lambda found, before, *_: same_bits(found, before),
    "as safetensors": as_safetensors_reads,
    "turned as said": turned_as_said,
    "finite": lambda found, before, *_: found.keys() == before.keys()
    and all(tensor.isfinite().all() for tensor in found.values()),
    "finite logits": lambda found, *_: found[1].isfinite().all(),
    # neither what is computed nor what can be divided changes
    "same logits": lambda found, before, *_: found[0] == before[0] and torch.equal(found[1], before[1]),
    # pairs may be fewer, as a tensor may be left out
    "pairs": lambda found, before, *_: found.keys() <= before.keys()
    and all(0 < scale < 1e9 and pair.a.isfinite().all() for pair, scale in found.values()),
    "survives": survives,
    "plan": lambda found, *_: json.loads(found) and "NaN" not in found,
    "samples": lambda found, *_: all(
        0 < len(sample.tokens) <= 64 and any(sample.is_trained[1:]) and all(0 <= token < 320 for token in sample.tokens)
        for sample in found
    ),
    "records": lambda found, *_: all(isinstance(json.loads(record["content"])[0], dict) for record in found),
    "ids": lambda found, *_: all(0 <= token < 320 for token in found),
}  # fmt: skip


# ---- ways to damage ----


def sealed(table: Any) -> bytes:
    return dumped(seal(table))


def changed_table(original: bytes) -> st.SearchStrategy[bytes]:
    """Of a sealed table the content with a seal to match, the content alone, or its bytes."""
    table = json.loads(original)
    unsealed = {key: value for key, value in table.items() if key != "checksum"}
    strategies = changed_document(unsealed).map(sealed), changed_document(table).map(dumped), changed_bytes(original)
    return st.one_of(strategies)


def changed_json(original: bytes) -> st.SearchStrategy[bytes]:
    return changed_document(json.loads(original)).map(dumped)


def broken_headers(original: bytes) -> Iterator[tuple[str, bytes]]:
    header, data = header_of(original)
    length = len(original) - len(data) - 8
    for name, text in BROKEN_TEXTS.items():
        yield f"header: {name}", with_header(text, data)
    for number in (0, 1, 7, length - 1, length + 1, len(original), 2**31, 2**32, 2**60, 2**63, 2**64 - 1):
        yield f"header length {number}", struct.pack("<Q", number) + original[8:]
    head, norm = header["lm_head.weight"], header["model.norm.weight"]
    for entry in ({"dtype": "F8_E4M3"}, {"dtype": "I64"}, {"dtype": "f32"}, {"shape": [2**40, 2**40]}, {"shape": [-1]}):
        yield f"entry {entry}", with_header(dumped({**header, "lm_head.weight": {**head, **entry}}), data)
    doubled = dumped(header)[:-1] + b', "lm_head.weight": ' + dumped(norm) + b"}"
    yield "a key twice", with_header(doubled, data)
    swapped = {**header, "model.norm.weight": header["model.layers.0.input_layernorm.weight"]}
    yield "two tensors at one place", with_header(dumped(swapped), data)


OWN_PLAN: Any = CONFIG_MAPPING["mixtral"].base_model_tp_plan


def distribution_plans(original: bytes) -> Iterator[tuple[str, bytes]]:
    attention = "layers.*.self_attn"
    plans: list[tuple[str, Any]] = [
        ("tp", {f"{attention}.q_proj": "rowwise", f"{attention}.o_proj": "colwise"}),
        ("tp", {**OWN_PLAN, "layers.*.input_layernorm": "rowwise", attention: "colwise"}),
        ("tp", {**OWN_PLAN, "layers.*.mlp.gate": "rowwise"}),
        ("tp", {**OWN_PLAN, f"{attention}.o_proj": "packed_rowwise", f"{attention}.q_proj": ["colwise"]}),
        ("tp", {f"layers.{number}.x": "rowwise" for number in range(200_000)}),
    ]
    for name in ("tp", "pp", "ep", "fsdp"):
        plans += [(name, value) for number, value in enumerate(HOSTILE_VALUES) if name == "tp" or number % 4 == 0]
    for name, plan in plans:
        yield f"{name} plan {plan!r:.60}", dumped({**json.loads(original), f"base_model_{name}_plan": plan})


def changed_plan(original: bytes) -> st.SearchStrategy[bytes]:
    config = json.loads(original)
    return changed_document({"base_model_tp_plan": OWN_PLAN}).map(lambda plans: dumped({**config, **plans}))


def adapter_configs(original: bytes) -> Iterator[tuple[str, bytes]]:
    config = json.loads(original)
    for key in ("peft_type", "peft_version", "r", "lora_alpha", "use_rslora", "target_parameters", "rank_pattern"):
        for value in HOSTILE_VALUES:
            yield f"{key} = {value!r:.60}", dumped({**config, key: value})
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in ("", "(", ".*", "[", "x" * 1000):
            for value in (0, -1, 2**70, "x", None, float("nan"), 3):
                yield f"{key} {pattern!r:.20} {value!r}", dumped({**config, key: {pattern: value}})


def encodings(original: bytes) -> Iterator[tuple[str, bytes]]:
    config = json.loads(original)
    own = config["quantization_config"]
    for value in [*HOSTILE_VALUES, [0, 0], [-8, 8], [8], [8, 8, 8], [2**62, 2**62], [1.5, 8], [True, True]]:
        for setting in ({**own, "weight_block_size": value}, value):
            yield f"{setting!r:.80}", dumped({**config, "quantization_config": setting})


class Call:
    """Pickled, it is a call that is made by whoever unpickles it."""

    def __init__(self, function: Any, *args: Any):
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def forged(original: bytes) -> Iterator[tuple[str, bytes]]:
    """Whoever can write a state's checksums can also write other weights, but run no code."""
    for call in (Call(os.system, "touch canary"), Call(Path("canary").touch), Call(eval, "open('canary', 'w')")):
        yield f"calls {call.call}", pickle.dumps(call)
    if b"__0_0.distcp" in original:
        yield "content of another file", original.replace(b"__0_0.distcp", b"../../secret")


def with_its_checksum(path: Path, file: str) -> None:
    table = {key: value for key, value in json.loads((path / MARKER).read_text()).items() if key != "checksum"}
    table["files"][file] = {"bytes": (path / file).stat().st_size, "xxh3_128": file_checksum(path / file)}
    (path / MARKER).write_bytes(sealed(table))


FORGED: Any = {"prepare": with_its_checksum}


def settings(original: bytes) -> Iterator[tuple[str, bytes]]:
    config = yaml.safe_load(original)
    values: list[Any] = [None, -1, 2**64, 10**400, float("nan"), "", "\ud800", [], ["a", "--b"], {"a": {}}]
    for number, field in enumerate(fields(TrainConfig)):
        for value in values[number % 3 :: 3]:
            yield f"{field.name} = {value!r:.60}", dumped({**config, field.name: value})


def changed_settings(original: bytes) -> st.SearchStrategy[bytes]:
    lines = st.lists(st.sampled_from(original.splitlines(keepends=True)), max_size=8).map(b"".join)
    syntax = lines.flatmap(lambda part: changed_bytes(part or b"a: b\n", b" \t\n:-?[]{},&*!|>'\"%@`#0\0\xff"))
    return st.one_of(syntax, changed_document(yaml.safe_load(original)).map(dumped))


def shortened(original: bytes) -> Iterator[tuple[str, bytes]]:
    for end in (0, 4, len(original) // 2, len(original) - 4):
        yield f"the first {end} bytes", original[:end]


def changed_rows(_: bytes) -> st.SearchStrategy[bytes]:
    text = b"\n".join(map(dumped, ROWS[:3]))
    return st.one_of(*(changed_document(row).map(dumped) for row in ROWS), changed_bytes(text))


def long_prefix(original: bytes) -> Iterator[tuple[str, bytes]]:
    """At which the package panics."""
    document = json.loads(original)
    document["model"]["continuing_subword_prefix"] = "x" * 9
    yield "a prefix longer than a token", dumped(document)


CONFIG, WEIGHTS = "config.json", "model.safetensors"
ANY, OF_TOKENIZER, OF_RUN = ("{path}", CONFIG), ("{path}", "tokenizer"), ("{path}", "--")
by_key, by_sealed_key = hostile_values(3), hostile_values(3, sealed)
INPUTS: dict[str, Input] = {
    # where it is; who reads it, and what may be taken; at random, how often, and by hand; what an error names
    "weights": Input("model", WEIGHTS, loaded, "as safetensors", changed_weights, 120, (broken_texts, broken_headers)),
    "index": Input("in parts", INDEX, loaded, "same", changed_json, 100, (broken_texts,)),
    "config": Input("model", CONFIG, computed, "finite logits", changed_json, 200, (broken_texts, by_key), ANY),
    "distribution plan": Input("model", CONFIG, computed, "same logits", changed_plan, 100, (distribution_plans,)),
    **{name: Input(name, CONFIG, computed, "finite logits", changed_json, 10, (hostile_values(20),), ANY)
       for name in FAMILIES},
    "adapter config": Input("adapter", "adapter_config.json", pairs, "pairs", changed_json, 45,
        (broken_texts, adapter_configs)),
    "adapter": Input("adapter", "adapter_model.safetensors", pairs, "pairs", changed_weights, 45, (broken_texts,)),
    **{name: Input(name, WEIGHTS, loaded, "finite", changed_weights, 80) for name in ("fp8", "mxfp4")},
    **{f"{name} config": Input(name, CONFIG, loaded, "same", changed_json, 10, (encodings,), ANY)
       for name in ("fp8", "mxfp4")},
    "manifest": Input("shards", MANIFEST, described, "turned as said", changed_table, 120,
        (broken_texts, by_sealed_key)),
    "marker": Input("trained", MARKER, resumed, "turned as said", changed_table, 100, (broken_texts, by_sealed_key)),
    "experts": Input("shards", "ep-00001-of-00002.safetensors", loaded, "unchanged", changed_bytes, 50),
    "dense": Input("shards", "dense-00001-of-00002.safetensors", loaded, "unchanged", changed_bytes, 50),
    "metadata": Input("trained", "state/.metadata", loaded, "unchanged", changed_bytes, 25),
    "state": Input("trained", "state/__0_0.distcp", loaded, "unchanged", changed_bytes, 25),
    "carried config": Input("trained", "model/config.json", loaded, "unchanged", changed_bytes, 20),
    "forged metadata": Input("trained", "state/.metadata", loaded, "anything", changed_bytes, 35,
        (forged, broken_texts), **FORGED),
    "forged state": Input("trained", "state/__0_0.distcp", loaded, "anything", changed_bytes, 35, (forged,), **FORGED),
    "settings": Input("settings", "config.yaml", run_config, "survives", changed_settings, 120,
        (broken_texts, settings), OF_RUN),
    "planned config": Input("settings", CONFIG, planned, "plan", changed_json, 15, (broken_texts, hostile_values(30)),
        ANY),
    "rates": Input("settings", "rates.json", planned, "plan", changed_json, 15, (broken_texts,), ANY),
    "lines": Input("data", "data.jsonl", samples("data.jsonl"), "samples", changed_bytes, 20, writes=True),
    "rows": Input("data", "data.jsonl", records, "records", changed_rows, 400),
    "table": Input("data", "data.csv", samples("data.csv"), "samples", changed_bytes, 10, writes=True),
    "text": Input("data", "data.txt", samples("data.txt"), "samples", changed_bytes, 10, writes=True),
    "list": Input("data", "data.json", samples("data.json"), "samples", changed_bytes, 9, (broken_texts,), writes=True),
    "parquet": Input("data", "data.parquet", samples("data.parquet"), "samples", changed_bytes, 60, (shortened,),
        writes=True),
    "tokenizer": Input("data", "tokenizer/tokenizer.json", tokens, "ids", changed_json, 60,
        (broken_texts, long_prefix), OF_TOKENIZER),
    "tokenizer config": Input("data", "tokenizer/tokenizer_config.json", tokens, "ids", changed_json, 60,
        (broken_texts,), OF_TOKENIZER),
    "given template": Input("data", "template.jinja", given_template, "anything", changed_bytes, 10),
    "own template": Input("data", "template.jinja", own_template, "anything", changed_bytes, 10, writes=True),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize("name", INPUTS)
def test_damaged(campaign: Callable[..., int], origin: Callable[[str], Path], name: str) -> None:
    campaign(damaged, name, origin(INPUTS[name].origin))


# ---- what is said ----

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
SCALE = f"{EXPERT}_scale_inv"
GROUPS = "model.layers.0.mlp.experts.down_proj"
BLOCKS, SCALES = f"{GROUPS}_blocks", f"{GROUPS}_scales"
NO_RUN = "does not run: RuntimeError"
Change = bytes | int | dict[str, Any] | Callable[[Any], Any]
"""Another content; so many bytes of it; keys of a JSON document; or what is done to that, or to a table of tensors."""


def transposed(said: Any) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        next(entry for entry in manifest["tensors"] if entry["name"].endswith("o_proj.weight"))["transposed"] = said

    return change


ERRORS: dict[str, list[tuple[Change, str]]] = {
    # of an input, what becomes of it, and a pattern of the error
    "config": [
        (b"", "config.json: cannot be read as JSON: Expecting value: line 1 column 1"),
        (b"\xff\xfe", "cannot be read as JSON: 'utf-8' codec can't decode byte 0xff"),
        (b"[" * 200_000, "cannot be read as JSON: maximum recursion depth exceeded"),
        (b'{"hidden_size": 1' + b"0" * 5000 + b"}", r"cannot be read as JSON: Exceeds the limit \(4300 digits\)"),
        (b"[1, 2]", "contains a list, not an object"),
        ({"model_type": "x"}, "has no models of type x; its architectures name MixtralForCausalLM"),
        ({"hidden_size": 10**30}, r"hidden_size is 10\^30; it must be an integer from 1 to 1,048,576"),
        ({"hidden_size": "x"}, "transformers cannot read it: Validation error for field 'hidden_size'"),
        ({"num_experts_per_tok": 3}, f"MixtralForCausalLM {NO_RUN}: k not in range"),
        ({"num_local_experts": 4}, r"gate.weight has shape \[2, 8\]; config.json needs \[4, 8\]"),
        ({"num_hidden_layers": 2}, "tensor model.layers.1.self_attn.q_proj.weight is missing"),
    ],
    "qwen3_moe": [
        ({"num_experts_per_tok": 9}, f"Qwen3MoeForCausalLM {NO_RUN}: k not in range"),
        ({"num_experts_per_tok": 0}, "layers.1.mlp.experts: 0 experts per token, of 8"),
        ({"num_experts_per_tok": -2}, "num_experts_per_tok is -2; it must be an integer from 0 to 4,096"),
        ({"num_local_experts": 6}, "config.json|tensor .* has (shape|no place)"),
        ({"num_local_experts": 16}, "config.json|tensor .* (has shape|is missing)"),
        ({"mlp_only_layers": [0, 1]}, "layers.1.mlp.experts.0.down_proj.weight has no place in this model"),
    ],
    "deepseek_v3": [
        ({"n_group": -1}, "n_group is -1; it must be an integer from 0 to 4,096"),
        ({"n_group": 3}, rf"{NO_RUN}: shape '\[-1, 3, 2\]' is invalid"),
        ({"topk_group": 3}, f"DeepseekV3ForCausalLM {NO_RUN}: k not in range"),
        ({"first_k_dense_replace": 2}, "layers.1.mlp.experts.0.down_proj.weight has no place in this model"),
        ({"first_k_dense_replace": 0}, "layers.0.mlp.down_proj.weight has no place in this model"),
        ({"first_k_dense_replace": 3}, "has no mixture-of-experts layer with this config"),
        ({"n_routed_experts": 6}, "layers.1.mlp.experts.6.down_proj.weight has no place in this model"),
    ],
    **{
        family: [
            ({"layer_types": ["full_attention"]}, r"`num_hidden_layers` \(3\) must be equal"),
            ({"layer_types": ["x"] * 3}, "The `layer_types` entries must be in"),
            ({"num_experts_per_tok": 9}, f"{NO_RUN}: k not in range"),
        ]
        for family in ("gpt_oss", "qwen3_next")
    },
    "index": [(b"{}", f"{INDEX}: weight_map must"), ({"weight_map": {"lm_head.weight": 3}}, "must be a table from")],
    "weights": [
        (0, "model.safetensors: not a complete safetensors file: .*header too small"),
        (600, "not a complete safetensors file: .*invalid header length"),
        (struct.pack("<Q", 2**60), "not a complete safetensors file: .*header too large"),
    ],
    "fp8": [
        (lambda t: t[SCALE][1, 1].fill_(torch.nan), f"{WEIGHTS}: tensor {SCALE} has scales that are not finite"),
        (lambda t: t[SCALE][0, 0].fill_(torch.inf), f"{WEIGHTS}: tensor {SCALE} has scales that are not finite"),
        (lambda t: t.pop(SCALE), f"{EXPERT} .model.safetensors. has dtype F8_E4M3, but its scales {SCALE} are missing"),
        (lambda t: t.update({f"{SCALE}_": t.pop(SCALE)}), f"its scales {SCALE} are missing"),
        (lambda t: t.pop(EXPERT), f"{SCALE} .* has scales of a tensor that is missing"),
        (lambda t: t.update({EXPERT: t[EXPERT].float()}), f"{SCALE} .* has scales of a tensor .*, or not quantized"),
        *((lambda t, shape=shape: t.update({SCALE: torch.ones(shape)}), rf"{SCALE} .* shape \{shape}; one scale per")
          for shape in ([5, 7], [1, 3, 4], [0, 4])),
        (lambda t: t.update({SCALE: t[SCALE].long()}), f"{SCALE} .* has dtype I64; scales must have one of F32, BF16"),
        (lambda t: t.update({SCALE: t[SCALE] > 0}), f"{SCALE} .* has dtype BOOL; scales must have one of F32, BF16"),
        (lambda t: t[EXPERT].view(torch.uint8)[3, 3].fill_(0x7F), f"tensor {EXPERT} has values that are not finite"),
        (lambda t: t.update({EXPERT: t[EXPERT].flatten()}), rf"{EXPERT} .* and shape \[768\]: not a matrix"),
    ],
    "fp8 config": [
        (b'{"model_type": "deepseek_v3", "quantization_config": %b}' % said, "quantization_config .* fp8 or mxfp4")
        for said in (b'{"quant_method": "gptq", "bits": 4}', b'"gptq"', b"[]")
    ],
    "mxfp4": [
        (lambda t: t[SCALES].view(-1)[5].fill_(255), f"{WEIGHTS}: tensor {SCALES} has scales that are not finite"),
        (lambda t: t.pop(SCALES), f"{BLOCKS} .* has dtype U8, but its scales {SCALES} are missing"),
        (lambda t: t.pop(BLOCKS), f"{SCALES} .* has scales of a tensor that is missing"),
        (lambda t: t.update({SCALES: t[SCALES][:, :-1]}), rf"{SCALES} .* has shape \[8, 31, 1\]; its blocks need"),
        (lambda t: t.update({SCALES: t[SCALES].float()}), f"{SCALES} .* has dtype F32; scales have"),
        (lambda t: t.update({BLOCKS: t[BLOCKS][..., :8]}), f"{BLOCKS} .*; of MXFP4 the last size is 16"),
        (lambda t: t.update({BLOCKS: t[BLOCKS][:-1]}), rf"{SCALES} .* its blocks need \[7, 32, 1\]"),
    ],
    "manifest": [
        (100, "manifest.json: cannot be read as JSON: Unterminated string"),
        ({"version": 3}, "version 3 is unknown; this release reads 'expertmesh-ep-shards' version 4"),
        # of a square matrix the shape does not tell
        *((transposed(said), rf"{MANIFEST}: .*o_proj.weight: transposed is {said!r}, ") for said in ("F32", 0, None)),
        (lambda t: next(e for e in t["tensors"] if "o_proj" in e["name"]).pop("transposed"), "transposed is None"),
    ],
    "marker": [(b"{}", "checkpoint.json"), (100, "checkpoint.json: cannot be read as JSON")],
    "dense": [(100, "dense-00001-of-00002.safetensors: has 100 bytes; manifest.json says 1248")],
    "metadata": [(100, "state/.metadata: has 100 bytes; checkpoint.json says")],
    "forged metadata": [(pickle.dumps(Call(os.system, "touch canary")), "state/.metadata")],
    "adapter config": [
        ({"peft_type": "IA3"}, "adapter_config.json: peft_type is 'IA3'; only LORA is read"),
        ({"r": 0}, "adapter_config.json: r is 0; it must be a positive number"),
        ({"rank_pattern": {"(": 2}}, r"rank_pattern has '\(', not a valid pattern: missing \)"),
    ],
    "adapter": [(50, "adapter_model.safetensors: not a complete safetensors file: .*invalid header length")],
    "settings": [
        (b"max_steps: x", "config.yaml: argument --max-steps: invalid int value: 'x'"),
        (b"of_another: 1", "unknown key of_another; --help lists all flags"),
    ],
    "planned config": [({"num_hidden_layers": -1}, "num_hidden_layers is -1; it must be an integer from 1 to 1,024")],
    "rates": [(b"{}", "--calibrate .*rates.json: is not what `python -m expertmesh.sharding mesh --check --json` or")],
    "lines": [(b"", "--dataset .*data.jsonl: is empty")],
    "rows": [(b'{"x": 1}\n', "line 1 has the columns x; it needs one of: messages; conversations;")],
    "list": [(b"[null, null]", "data.json: record 1 is no JSON object: None")],
    "parquet": [(4, "data.parquet: cannot be read as Parquet after record 0: Parquet file size is 4 bytes")],
    "tokenizer": [(b"{}", "tokenizer: has no tokenizer; give one with --tokenizer")],
    "tokenizer config": [(b"", r"has no tokenizer; give one with --tokenizer \(Expecting value")],
}  # fmt: skip
TENSORS: list[tuple[Callable[[Tensors, str], Any], str]] = [
    (lambda t, name: t.pop(name), "(is|are) missing"),
    (lambda t, name: t.update({name: torch.cat([t[name], t[name][:1]])}), "has shape .*; config.json needs"),
    (lambda t, name: t.update({name: t[name].flatten()[None, None]}), "has shape .*; config.json needs"),
    (lambda t, name: t.update({name: t[name].to(torch.complex64)}), "has dtype C64; it must be one of F32, BF16"),
    (lambda t, name: t[name].fill_(torch.nan), "has values that are not finite"),
    (lambda t, name: t.update({f"{name}_": t[name].clone()}), "has no place in this model"),
]


TABLES: dict[str, Any] = {"errors": ERRORS, "contents": CONTENTS}


def changed(original: bytes, file: str, change: Change) -> bytes:
    """A file after a change; sealed if it was."""
    if isinstance(change, bytes | int):
        return change if isinstance(change, bytes) else original[:change]
    if file.endswith(".safetensors"):
        tensors = load(original)
        change(tensors)  # type: ignore[operator]
        return save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": "pt"})
    document = json.loads(original)
    is_sealed = document.pop("checksum", None) is not None
    document.update(change) if isinstance(change, dict) else change(document)
    return sealed(document) if is_sealed else dumped(document)


def refused(watch: Watch, inputs: dict[str, Path], table: str) -> None:
    for name, origin in inputs.items():
        row, path = INPUTS[name], watch.directory / name.replace(" ", "-")
        shutil.copytree(origin, path)
        watch.writable += [str(watch.directory / "cache")] * row.writes
        file, names = path / row.file, [text.format(path=path) for text in row.said]
        original = file.read_bytes()
        expected = row.read(path) if table == "contents" else None
        for change, said in TABLES[table][name]:
            file.write_bytes(changed(original, row.file, change))
            row.prepare(path, row.file)
            case = f"{name}: {change!r:.60}: {said}"
            found = watch.attempt(case, partial(row.read, path), *names)
            if said is None:
                assert RIGHT[row.right](found, expected, file.read_bytes(), original), f"{case}: gave {found!r:.500}"
                continue
            assert isinstance(found, Refused), f"{case}: was taken, and gave {found!r:.200}"
            assert said in found.message or re.search(said, found.message, re.DOTALL), f"{case}: {found.message}"


def _of(change: Callable[[Tensors, str], Any], name: str, tensors: Tensors) -> None:
    change(tensors, name)


def tensors_refused(watch: Watch, origins: list[Path]) -> None:
    """Whichever of a model's tensors is missing, of another shape or type, or too much: it is named."""
    for origin in origins:
        path = watch.directory / origin.name
        shutil.copytree(origin, path)
        file = path / "model.safetensors"
        original = file.read_bytes()
        names = list(load(original))
        for name in names[:: max(1, len(names) // 5)]:
            for change, said in TENSORS:
                file.write_bytes(changed(original, file.name, partial(_of, change, name)))
                message = watch.refuse(f"{origin.name}: {name} {said}", partial(loaded, path), str(path))
                assert re.search(said, message), f"{origin.name}: {name}: {said} is not in: {message}"


def test_thousands() -> None:
    """As README.md says; with what is damaged by hand there are twice as many."""
    assert sum(row.num_drawn for row in INPUTS.values()) >= 2_000


@pytest.mark.parametrize("table", ["errors", pytest.param("contents", marks=pytest.mark.slow)])
def test_refused(campaign: Callable[..., int], origin: Callable[[str], Path], table: str) -> None:
    """Or taken, and right, where the table has no error."""
    rows = TABLES[table]
    inputs = {name: origin(INPUTS[name].origin) for name in rows}
    assert campaign(refused, inputs, table) == sum(map(len, rows.values()))


@pytest.mark.parametrize(
    "origins", [["model"], pytest.param(FAMILIES, marks=pytest.mark.slow)], ids=["mixtral", "others"]
)
def test_tensors(campaign: Callable[..., int], origin: Callable[[str], Path], origins: list[str]) -> None:
    assert campaign(tensors_refused, [origin(name) for name in origins]) >= 30 * len(origins)
