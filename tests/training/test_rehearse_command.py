"""`python -m expertmesh.sharding rehearse`: what it says, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensor
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralAttention

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.cluster.commands import main
from expertmesh.training.model_setup.rates import natural_imbalance
from expertmesh.training.monitoring.attribution import StepPlace
from expertmesh.training.planning.imbalance import GivenRouting
from expertmesh.training.planning.memory import FRAGMENTATION, LASTING, PEER, RING
from expertmesh.training.planning.rehearsal.collective_order import check_order
from expertmesh.training.planning.rehearsal.recorder import Event
from tests.flags import last_of_each
from tests.tiers import tiered

LAYERS = 8
FLAGS = ["--gpus", "16", "--ep-size", "8", "--bf16", "--max-seq-length", "64", "--per-device-train-batch-size", "1"]


def save_config(directory: Path, num_layers: int) -> str:
    """A directory with nothing but a config."""
    MixtralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
    ).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As deep as it takes for few layers to be run."""
    return save_config(tmp_path_factory.mktemp("model"), LAYERS)


def told(model: str, capsys: pytest.CaptureFixture[str], *flags: str, code: int = 0) -> str:
    assert main(["rehearse", *last_of_each(["--model", model, *FLAGS, *flags])]) == code
    said = capsys.readouterr()
    return said.out if code < 2 else said.err


def accounts(model: str, capsys: pytest.CaptureFixture[str], *flags: str) -> list[Any]:
    found: list[Any] = json.loads(told(model, capsys, "--json", *flags))
    return found


def test_it_says_all_of_a_step(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = told(model, capsys, "--gradient-accumulation-steps", "3")
    assert f" B parameters, {LAYERS} layers, by dry runs of 3 and more; rank 0 of 16 on " in said
    assert "\nfits: " in said
    for name in ("optimizer", "NCCL: ep, 8 ranks", "fragmentation", "CUDA's context", "tokens/s per GPU"):
        assert name in said
    # how many rows come; there and back, forward and backward; at each layer of three micro-batches
    (line,) = (line.split() for line in said.splitlines() if line.startswith("all-to-all"))
    assert line[:4] == ["all-to-all", "ep", "8", str(5 * LAYERS * 3)]
    tables = said.partition("\nstep: ")[0].partition("\nat the peak")[2]
    assert max(map(len, tables.splitlines())) <= 80


def test_every_layer_says_what_few_say(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--gradient-checkpointing", "full", "--expert-kernel", "torch-grouped"]
    (few,), (every,) = (accounts(model, capsys, *flags, *more) for more in ([], ["--every-layer"]))
    assert few["run"] < every["run"] == LAYERS
    assert few["memory"] == every["memory"]
    for name in ("sent", "fit", "layers", "stages", "host_waits"):
        assert few[name] == every[name], name
    assert few["needed"] == pytest.approx(every["needed"])
    assert few["time"] == pytest.approx(every["time"])
    assert few["tokens_per_second"] == pytest.approx(every["tokens_per_second"])


@pytest.mark.slow
def test_what_it_needs_is_more_than_tensors(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    (account,) = accounts(model, capsys)
    fit, kinds = account["fit"], account["memory"]["kinds"]
    assert fit["tensors"] == account["memory"]["peak"] == sum(kinds.values())
    lasting = sum(kinds[term] for term in LASTING)
    assert fit["fragmentation"] == pytest.approx(FRAGMENTATION * (fit["tensors"] - lasting))
    buffers = {c["name"]: c["size"] for c in fit["communicators"]}
    assert buffers == {"world": RING, "dp": RING, "ep": 7 * PEER}
    parts = (fit["tensors"], sum(buffers.values()), fit["fragmentation"], fit["context"])
    assert account["needed_bytes"] == pytest.approx(sum(parts))
    assert account["fits"]


@pytest.mark.slow
def test_a_card_that_is_too_small(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not fit: " in told(model, capsys, "--gpu-memory", "512MiB", code=1)


@pytest.mark.release
def test_every_stage_of_a_pipeline(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["rehearse", "--model", model, *FLAGS, "--pp-size", "2", "--gradient-accumulation-steps", "5"]
    assert main([*command, "--ranks", "all"]) == 0
    said = capsys.readouterr().out
    assert "stage 1 (layers 0 to 3) of 2" in said
    # which a run would choose, too
    assert "pp 2 1f1b" in said
    assert "waiting for other stages" in said
    assert "ranks run: 0: " in said
    assert "; 8: " in said
    assert main([*command, "--ranks", "all", "--json"]) == 0
    by_rank = {account["rank"]: account for account in json.loads(capsys.readouterr().out)}
    assert sorted(by_rank) == [0, 1, 8, 9, 15]
    first = by_rank[0]
    assert first["layers"] == [4, LAYERS]
    assert first["time"]["bubble"] > 0
    # a layer gives one tensor, which is sent with each micro-batch, and its gradient comes back
    sent = {(each["group"], each["kind"]): each["times"] for each in first["sent"]}
    assert sent["pp (forward)", "send"] == sent["pp (backward)", "receive"] == 5


@pytest.mark.slow
def test_every_stage_is_run_by_its_most_loaded_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `--ranks all` tells of a stage is what its most loaded rank says when it is run alone."""
    config = MixtralConfig(
        vocab_size=32768,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    config.save_pretrained(tmp_path)
    command = [
        *("rehearse", "--model", str(tmp_path), "--gpus", "8", "--ep-size", "4", "--pp-size", "2", "--bf16"),
        *("--pipeline-layers", "1,1", "--pipeline-schedule", "1f1b", "--max-seq-length", "8192"),
        *("--per-device-train-batch-size", "1", "--imbalance", "3", "--json"),
    ]

    def run(*flags: str, code: int = 0) -> dict[int, Any]:
        assert main([*command, *flags]) == code
        return {account["rank"]: account for account in json.loads(capsys.readouterr().out)}

    together = run("--ranks", "all")
    assert sorted(together) == [0, 1, 4, 5, 7]
    for first, loaded in [(0, 1), (4, 5)]:
        # a rank that is run alone is the most loaded one
        alone = run("--rank", str(loaded))[loaded]
        assert together[loaded]["memory"]["peak"] == alone["memory"]["peak"] > together[first]["memory"]["peak"]
        # whoever tells of the step, it takes as long
        assert together[first]["seconds"] == alone["seconds"]
    # where memory suffices for every rank but the most loaded one of the last stage, the run does not fit
    needed = {rank: account["needed_bytes"] for rank, account in together.items()}
    enough = max(bytes_ for rank, bytes_ in needed.items() if rank != 5)
    assert needed[5] > enough
    card = f"{(needed[5] + enough) / 2 / 2**20:.0f}MiB"
    assert not run("--ranks", "all", "--gpu-memory", card, code=1)[5]["fits"]


@pytest.mark.release
def test_ranks_of_a_tensor_parallel_group(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Their collectives have one order; what runs beside them on a GPU is not known."""
    said = told(model, capsys, "--tp-size", "2", "--cp-size", "2", "--ranks", "all", "--async-tp")
    assert "; ep 8, " in said
    assert ", cp 2, tp 2\n" in said
    assert "a step of 1 x 1 x 64 tokens per 4 ranks takes " in said
    for name in ("tp (activations), 2 ranks", "dense of tp, 8 ranks", "cp, 2 ranks"):
        assert f"NCCL: {name}" in said
    assert " gathers of activations + " in said
    assert "collectives have the same order" in said
    assert "--async-tp: not modelled" in said


@pytest.mark.slow
def test_the_most_loaded_rank_holds_more(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    first, last, loaded = accounts(model, capsys, "--ranks", "all", "--imbalance", "2")
    assert [account["rank"] for account in (first, last, loaded)] == [0, 15, 1]
    assert last["memory"]["peak"] == pytest.approx(first["memory"]["peak"], rel=0.01)
    assert loaded["memory"]["peak"] > 1.02 * first["memory"]["peak"]
    said = told(model, capsys, "--ranks", "all", "--imbalance", "2")
    assert "ranks run: 0: " in said
    assert "have the same order" in said


def test_shares_of_skewed_routing() -> None:
    assert GivenRouting(busiest=2.0, loaded=2).shares(4, 4) == pytest.approx((1 / 6, 1 / 6, 1 / 2, 1 / 6))
    assert GivenRouting(busiest=4.0).shares(4, 4) == (1, 0, 0, 0)
    assert GivenRouting(busiest=None).shares(8, 8)[0] == pytest.approx(natural_imbalance(8) / 8)
    assert GivenRouting().shares(8, 8) == ()


@pytest.mark.slow
def test_packed_rows_cost_fewer_pairs(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flops = {
        samples: {
            part["name"]: part["flops"]
            for part in accounts(model, capsys, "--packing", "--samples-per-row", samples)[0]["parts"]
        }
        for samples in ("1", "4")
    }
    # samples of 64 and of 16 tokens: 65 / 2 and 17 / 2 pairs a token
    assert flops["4"]["attention"] == pytest.approx(flops["1"]["attention"] * 17 / 65)
    assert flops["4"]["expert GEMMs"] == flops["1"]["expert GEMMs"]


@pytest.mark.parametrize("ep_size", tiered(["1"], slow=["8", "4"]))
def test_what_a_step_needs_is_the_same_by_every_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ep_size: str
) -> None:
    """FLOPs of one expert, of few one after the other, and of many at once; also of GEMMs that are written in place."""
    model = save_config(tmp_path, 1)
    needed = [
        accounts(model, capsys, "--ep-size", ep_size, "--expert-kernel", kernel)[0]["needed"]
        for kernel in ("loop", "torch-grouped", "quack")
    ]
    assert needed == pytest.approx([needed[0]] * 3, rel=1e-9)


def test_a_kernel_that_gathers_rows_leaves_them_where_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither forward nor backward writes a row for each expert of a token, and fewer passes compute the activation."""
    model = save_config(tmp_path, 2)
    flags = ["--gpus", "8", "--ep-size", "8", "--dispatch", "rank", "--bf16", "--expert-kernel"]
    given, gathered = (
        {part["name"]: part for part in accounts(model, capsys, *flags, kernel)[0]["parts"]}
        for kernel in ("torch-grouped", "quack")
    )
    assert gathered["expert GEMMs"]["flops"] == given["expert GEMMs"]["flops"]
    # two of eight passes over rows are left out
    assert gathered["permute, combine"]["moved"] < 0.8 * given["permute, combine"]["moved"]
    assert gathered["experts' activation"]["moved"] < 0.4 * given["experts' activation"]["moved"]


@pytest.mark.slow
def test_offload_leaves_what_lasts_in_host_memory(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    (account,) = accounts(model, capsys, "--offload")
    kinds, fit = account["memory"]["kinds"], account["fit"]
    assert fit["host"] == sum(kinds[term] for term in LASTING)
    assert fit["tensors"] == account["memory"]["peak"] - fit["host"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [["--gpus", "8"], ["--gpus", "16"]], ids=["alone", "sharded"])
def test_frozen_experts_in_host_memory(model: str, capsys: pytest.CaptureFixture[str], layout: list[str]) -> None:
    """All of them; on the GPU are those of two layers at most, where a lone rank would have had all."""
    flags = ["--adapter", "lora", "--lora-rank", "1", "--gradient-checkpointing", "full", *layout]
    (kept,), (offloaded,) = (accounts(model, capsys, *flags, *more) for more in ([], ["--offload-experts"]))
    # an expert per rank, or half of one: three matrices of 64 x 64 in bf16
    one = 3 * 64 * 64 * 2
    assert kept["fit"]["host"] == 0
    assert offloaded["fit"]["host"] == LAYERS * one * 8 // int(layout[-1])
    saved = kept["fit"]["tensors"] - offloaded["fit"]["tensors"]
    if layout[-1] == "8":
        # adapters, and rows of tiny batches, are gathered beside
        assert (LAYERS - 2) * one - one // 2 <= saved <= LAYERS * one
    else:
        assert saved == LAYERS * one // 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_inputs_of_layers_in_host_memory(model: str, capsys: pytest.CaptureFixture[str], mode: str) -> None:
    flags = ["--gradient-checkpointing", mode, "--max-seq-length", "2048"]
    kept, offloaded = (accounts(model, capsys, *flags, *more)[0]["memory"] for more in ([], ["--offload-activations"]))
    # (2048, 64) in bf16
    one = 2048 * 64 * 2
    assert kept["kinds"]["activations"] - offloaded["kinds"]["activations"] == LAYERS * one
    # of the layer in backward, and of the one before it
    assert kept["peak"] - offloaded["peak"] >= (LAYERS - 2) * one * (mode == "selective")
    assert offloaded["peak"] < kept["peak"]


def test_what_fails_is_told_with_its_layer(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # what others kept of the same question says nothing of this model, nor this one's failure of theirs
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forward = MixtralAttention.forward

    def too_narrow(self: Any, hidden_states: Any, **kwargs: Any) -> Any:
        # not where the model is probed, before
        is_wrong = self.layer_idx == 2 and isinstance(hidden_states, FakeTensor)
        return forward(self, hidden_states[..., :-1] if is_wrong else hidden_states, **kwargs)

    monkeypatch.setattr(MixtralAttention, "forward", too_narrow)
    said = told(model, capsys, code=2)
    assert said.startswith("sharding: error: the dry run fails in the forward of decoder layer 7, in model.layers.7.")
    assert "63" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rank", "16"], "--rank 16: of 16 GPUs the ranks are 0 to 15"),
        (["--imbalance", "0.5"], "--imbalance 0.5: must be 1 (the mean) or more"),
        (["--imbalance", "/nonexistent"], "--imbalance /nonexistent: is not a readable metrics.jsonl"),
        (["--routing", "m"], "--routing was removed: --imbalance RUN/metrics.jsonl takes the load"),
        (["--timeline", "step.svg"], "--timeline was removed: --json has the memory at every layer and phase"),
        (["--use-cpu"], "--use-cpu"),
        (["--freeze", "nothing-like-it"], "--freeze nothing-like-it"),
        (["--learning-rat", "1"], "unknown flag --learning-rat"),
        (["--packing", "--samples-per-row", "40"], "--samples-per-row 40: samples of 1 tokens"),
        (
            ["--rope-scaling", '{"sliding": {"rope_type": "yarn", "factor": 4}}'],
            "--rope-scaling: all layers of this model",
        ),
        (["--gpus", "15", "--ep-size", "15"], "--ep-size 15"),
        (
            ["--tp-size", "2", "--gpus-per-node", "1"],
            "--tp-size 2: a group has node 0, rank 0 and node 1, rank 1; its ranks exchange activations",
        ),
        (["--pp-size", "3"], "--pp-size 3 does not divide the 16 ranks; use 1, 2, 4, 8 or 16"),
        (["--pp-size", "4"], "--ep-size 8 does not divide the 4 ranks; use 1, 2 or 4"),
        (["--tp-size", "3"], "--tp-size 3 does not divide the 16 ranks; use 1, 2, 4, 8 or 16"),
        (["--pp-size", "16", "--ep-size", "1"], "--pp-size 16: 16 stages need 16 decoder layers or more"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(model: str, capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    assert said in told(model, capsys, *flags, code=2)


def call(kind: str, ranks: tuple[int, ...], **size: Any) -> Event:
    """A collective among these ranks; what a stage sends or receives has the other rank second."""
    return Event(kind, StepPlace("FSDP", None), "forward", 0, collective=kind, ranks=ranks, group="1", **size)


def test_ranks_that_do_not_agree() -> None:
    gather, reduce = call("all-gather", (0, 1)), call("reduce-scatter", (0, 1))
    assert check_order({0: [gather, reduce], 1: [gather, reduce]}) == 2
    with pytest.raises(ExpertMeshError, match=r"ranks 0 and 1 differ .* among 2 ranks: number 2 is reduce-scatter"):
        check_order({0: [gather, reduce], 1: [gather, gather]})
    with pytest.raises(ExpertMeshError, match=r"number 2 is reduce-scatter .* and none any more on rank 1"):
        check_order({0: [gather, reduce], 1: [gather]})
    # each group by itself agrees, and all of them together do not
    alone, other = call("all-to-all", (0, 2)), call("all-to-all", (1, 2))
    with pytest.raises(ExpertMeshError, match="of all groups: number 1"):
        check_order({0: [alone, gather], 1: [gather, other]})
    # ranks of different stages need not
    assert check_order({0: [alone, gather], 1: [gather, other]}, ranks_per_stage=1) == 2


def test_ranks_whose_collectives_have_other_sizes() -> None:
    gather = call("all-gather", (0, 1), sent=100)
    with pytest.raises(ExpertMeshError, match=r"collective 2 among 2 ranks.* rank 0 sends 100 bytes, and rank 1 200"):
        check_order({0: [gather, gather], 1: [gather, replace(gather, sent=200)]})
    # groups with other members have sizes of their own, also those of a stage
    apart = {0: [gather], 2: [replace(gather, ranks=(2, 3), sent=200)]}
    assert check_order(apart) == 1

    # of an all-to-all, what one rank sends is what the other expects, and no more has to be equal
    first = call("all-to-all", (0, 1), sent=12, to_each=(8, 16), from_each=(8, 24))
    second = call("all-to-all", (0, 1), sent=20, to_each=(24, 16), from_each=(16, 16))
    assert check_order({0: [first], 1: [second]}) == 1
    with pytest.raises(ExpertMeshError, match="rank 0 sends 16 bytes to rank 1, which expects 12"):
        check_order({0: [first], 1: [replace(second, from_each=(12, 16))]})
    with pytest.raises(ExpertMeshError, match="rank 1 sends 20 bytes to rank 0, which expects 24"):
        check_order({0: [first], 1: [replace(second, to_each=(20, 16))]})


def test_what_is_sent_is_what_is_received() -> None:
    sent, received = call("send", (0, 1), sent=8), call("receive", (1, 0), written=8)
    assert check_order({0: [sent, sent], 1: [received, received]}, ranks_per_stage=1) == 2
    with pytest.raises(ExpertMeshError, match=r"number 1 of what rank 0 sends to rank 1 is 8 bytes .* 12 bytes"):
        check_order({0: [sent], 1: [replace(received, written=12)]}, ranks_per_stage=1)
    with pytest.raises(ExpertMeshError, match=r"number 2 .* and of what rank 1 receives from there none any more"):
        check_order({0: [sent, sent], 1: [received]}, ranks_per_stage=1)
    # in another group nothing is sent
    with pytest.raises(ExpertMeshError, match="is none any more, and of what rank 1 receives from there 8 bytes"):
        check_order({0: [], 1: [replace(received, group="2")]}, ranks_per_stage=1)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--tp-size", "2", "--gpus", "32"]], ids=["whole", "divided"])
def test_a_teacher_costs_a_second_pass_of_the_head(
    flags: list[str], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--teacher", "x", "--teacher-top-k", "8"]
    flops = []
    for more in ([], given):
        (account,) = accounts(model, capsys, *flags, *more)
        flops.append({part["name"]: part["flops"] for part in account["parts"]})
    without, taught = flops
    # forward and two products of backward, beside a forward alone
    assert taught.pop("LM head, loss") == pytest.approx(without.pop("LM head, loss") * 4 / 3)
    assert taught == without


@pytest.mark.slow
@pytest.mark.parametrize(("task", "sequences"), [("dpo", "2"), ("kto", "1")])
def test_a_step_of_preferences(task: str, sequences: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It sends what a step of as many sequences sends: two of a pair, one of a labelled answer."""

    def sent(*flags: str) -> tuple[str, list[str]]:
        said = told(model, capsys, "--pp-size", "2", "--gradient-accumulation-steps", "3", *flags)
        return said, [" ".join(line.split()) for line in said.splitlines() if line.startswith("all-to-all")]

    said, found = sent("--task", task)
    assert found == sent("--per-device-train-batch-size", sequences)[1] != []
    assert ("--task kto: the forward pass of mismatched answers before each step is not modelled" in said) is (
        task == "kto"
    )
