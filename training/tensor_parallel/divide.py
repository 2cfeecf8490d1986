"""What of a finished model tensor parallelism divides: the regions of transformers' plan, and the vocabulary.

Each rank has the rows of some of the vocabulary's tokens. It looks up what it has of all tokens of the group, with
zeros for the others, and the sum over the ranks is exact: all but one of the summands are zero.

Shape suffixes: n ranks, B sequences, L positions of each on this rank, D model width, V vocabulary, v = V/n of it on
this rank.
"""

import re
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...moe.experts.forward import current_forward
from ...moe.experts.lora import TOKENS
from ...moe.experts.model_facts import facts_of
from ...moe.experts.model_layers import decoder_layers
from ...moe.hf_model.build import fp32_parameters
from ...moe.hf_model.families import families_with_plan
from ...moe.hf_model.family_exceptions import UNDIVIDED
from ...moe.hf_model.tensor_plan import DividedModule, regions_of
from ...moe.kernels.fp8_casts import MULTIPLE
from ...moe.linear.division import Division
from ...moe.linear.linear import Linear, is_fp8
from ...moe.util.change_order import begin_change
from ...moe.util.errors import ExpertMeshError
from ...sharding.collectives.tensor_parallel import TPGroup
from ...sharding.state import computing_with, local_tensor
from ...sharding.topology import divisors, either
from ..attention.layer_kinds import mixers_of
from ..model_setup.new_tokens import with_new_tokens
from .regions import AttentionRegion, ByToken, Colwise, FullWidth, Rowwise, TensorParallel


def apply_tensor_parallel(model: Any, tp_size: int) -> TensorParallel:
    """Have the modules that transformers' plan names run divided over the ranks of a group, in place.

    Args:
        model: from `build_model`, on the meta device, with its adapters.
        tp_size: ranks of the group.

    Returns:
        What is divided; `model.divided` has, for each parameter that is, the path of the module whose call needs it.

    Raises:
        ExpertMeshError: the plan has nothing for the family's attention, or its heads or widths cannot be divided.
    """
    begin_change(model, "tensor parallelism")
    mixing = {mixer for layer in decoder_layers(model) for mixer in mixers_of(layer)}
    mixers = {path for path, part in model.named_modules() if part in mixing}
    plans = regions_of(model)
    model_type = model.config.model_type
    if model_type in UNDIVIDED:
        raise ExpertMeshError(
            f"--tp-size {tp_size}: cannot shard the attention of {model_type}: {UNDIVIDED[model_type]}; "
            "leave it out, or use --cp-size"
        )
    if not any(plan.path in mixers for plan in plans):
        raise ExpertMeshError(
            f"--tp-size {tp_size}: transformers has no tensor-parallel plan (base_model_tp_plan) for "
            f"the attention of {model_type}; leave it out, or use --cp-size. It has one for "
            f"{', '.join(families_with_plan())}"
        )
    _check_heads(model, tp_size)
    parallel = TensorParallel(TPGroup(tp_size, 0, None))
    # of what the family keeps in fp32 each rank has all, of which it takes its part in every forward, as of adapters,
    # as it has no FSDP unit with the others of its module
    kept = fp32_parameters(model).keys()
    model.divided = {}
    for plan in plans:
        names = _divide(model, plan, parallel, is_attention=plan.path in mixers)
        model.divided |= dict.fromkeys(names - kept, plan.path)
    model.tensor_parallel = parallel
    return parallel


_HEADS = re.compile(r"(?:^|_)num_(?:\w+_)?(attention|key_value)_heads$")


def _check_heads(model: Any, tp_size: int) -> None:
    # also those of layers of another kind, as num_global_key_value_heads
    for name, number in model.config.get_text_config().to_dict().items():
        if (found := _HEADS.search(name)) and isinstance(number, int) and number % tp_size:
            what = "attention heads" if found[1] == "attention" else "key and value heads"
            raise ExpertMeshError(
                f"--tp-size {tp_size} does not divide the {number} {what} of this model ({name}); use "
                f"{either(divisors(number))}"
            )


def _divide(model: Any, plan: DividedModule, parallel: TensorParallel, is_attention: bool) -> set[str]:
    """Returns the names of the parameters that are divided."""
    size, module = parallel.group.size, model.get_submodule(plan.path)
    owned = (*plan.colwise, *plan.rowwise)
    divided = {f"{path}.weight" for path in owned} | set(plan.values)
    divided |= {f"{path}.bias" for path in plan.colwise if model.get_submodule(path).bias is not None}
    rows = {name: model.get_parameter(name).shape[0] for name in divided}
    for name, number in rows.items():
        if number % size:
            raise ExpertMeshError(
                f"--tp-size {size} does not divide the {number} rows of {name}; use a divisor of them"
            )
        if is_fp8(model.get_submodule(name.rpartition(".")[0])) and number // size % MULTIPLE:
            raise ExpertMeshError(
                f"--dense-precision fp8: needs widths that are multiples of {MULTIPLE}, but --tp-size "
                f"{size} leaves each rank {number // size} of the {number} rows of {name}; use a smaller "
                "--tp-size, or leave out one of them"
            )
    values = {name.rpartition(".")[2]: rows[name] // size for name in plan.values}
    region = (AttentionRegion if is_attention else ByToken)(parallel, plan, values)
    parallel.regions.append(region)
    module.register_forward_pre_hook(region.enter, with_kwargs=True)
    module.register_forward_hook(region.leave, always_call=True)
    for path in owned:
        layer = model.get_submodule(path)
        layer.__class__ = Linear
        what: Literal["outputs", "inputs"] = "outputs" if path in plan.colwise else "inputs"
        layer.division = Division(what, parallel.group, rows[f"{path}.weight"] // size)
        layer.forward = (Colwise if what == "outputs" else Rowwise)(layer, region)
        region.divided.append(layer)
        if what == "inputs":
            region.last.append(layer.forward)
    widths = {model.get_submodule(path).out_features for path in plan.colwise} if plan.gathers else set()
    for part in module.modules():
        if isinstance(part, Linear) and part.is_fp8 and part not in region.divided:
            part.division = Division("nothing", parallel.group)
            region.divided.append(part)
            part.register_forward_pre_hook(region.check_alike)
        own = list(part.parameters(recurse=False))
        if own and not isinstance(part, nn.Linear) and all(tuple(p.shape) in {(w,) for w in widths} for p in own):
            hooks = FullWidth(region)
            part.register_forward_pre_hook(hooks.enter)
            part.register_forward_hook(hooks.leave)
    return divided


def divide_vocabulary(model: Any, cross_entropy: str) -> str:
    """Have embedding and head divided by vocabulary too, where they can be, in place.

    Args:
        model: that `apply_tensor_parallel` was given, with its `LossHead`.
        cross_entropy: of `--cross-entropy`. Only chunks are computed of a divided head.

    Returns:
        A line for a run's first ones.
    """
    why_not = undivided_vocabulary(model, model.tensor_parallel.group.size, cross_entropy)
    modules = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    for path, module in model.named_modules():
        if any(module is modules[name] and reason is None for name, reason in why_not.items()):
            model.divided |= {f"{path}.{name}": path for name, _ in module.named_parameters(recurse=False)}
            is_head = module is modules["head"]
            tell = partial(setattr, module, "vocabulary") if is_head else partial(DividedEmbedding, module)
            model.tensor_parallel.vocabulary[path] = tell
    return "vocabulary: " + ", ".join(
        f"{name} divided" if reason is None else f"{name} complete on each rank ({reason})"
        for name, reason in why_not.items()
    )


def undivided_vocabulary(model: Any, tp_size: int, cross_entropy: str) -> dict[str, str | None]:
    """Why a model's embedding, and its head, are not divided by vocabulary; None where they are."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is head.weight:
        return {"embedding": "tied to the head", "head": "tied to the embedding"}
    why_not: dict[str, str | None] = {}
    for name, module in (("embedding", embedding), ("head", head)):
        number = len(module.weight)
        why_not[name] = f"its {number:,} tokens are not a multiple of --tp-size {tp_size}" if number % tp_size else None
    if not isinstance(embedding, nn.Embedding):
        why_not["embedding"] = f"a {type(embedding).__name__} is no nn.Embedding"
    facts = facts_of(model)
    if not facts.head_is_last:
        why_not["head"] = "its logits are scaled or capped afterwards"
    elif next(path for path, module in model.named_modules() if module is head) in facts.read_weights:
        why_not["head"] = "other modules read its weight"
    elif cross_entropy not in ("auto", "chunked"):
        why_not["head"] = f"--cross-entropy {cross_entropy} computes with all of it; chunked computes with parts"
    return why_not


class DividedEmbedding:
    """The forward of an embedding, from now on, that computes with this rank's rows of its weight: when it is called, v
    of them are here, as a DTensor or as a plain tensor.

    It gives each rank its positions in a forward whose sequences are split, and else all of them: the ranks of the
    group then have the same.
    """

    def __init__(self, embedding: Any, group: TPGroup):
        self.embedding, self.group = embedding, group
        embedding.forward = self
        # as torch has it, the token whose row has no gradient is within the rows
        rows = len(embedding.weight) // group.size
        padding = -1 if embedding.padding_idx is None else embedding.padding_idx - rows * group.index
        embedding.padding_idx = padding if 0 <= padding < rows else None

    def __call__(self, tokens_BL: Tensor) -> Tensor:
        forward, group = current_forward(), self.group
        if forward is not None and forward.split is not None:
            return group.reduce_scatter(self._looked_up(group.all_gather(tokens_BL, dim=0)), dim=0)
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.embedding.parameters()):
            raise ExpertMeshError(
                "--tp-size: with a sharded vocabulary, calling the model gives no gradients; use the "
                "engine's forward_backward, or call the model under torch.no_grad()"
            )
        x_BSD = self._looked_up(tokens_BL)
        if group.ranks is not None:
            dist.all_reduce(x_BSD, group=group.ranks)
        return x_BSD

    def _looked_up(self, tokens_BS: Tensor) -> Tensor:
        """What the family's own forward, which may scale or norm, makes of these tokens; zeros for those of other
        ranks."""
        weight_vD = local_tensor(self.embedding.weight)
        own_BS = tokens_BS - self.group.index * len(weight_vD)
        # spread over all rows, so that no row gets the gradients, zeros though they are, of many tokens at once
        place_BS = own_BS % len(weight_vD)
        with computing_with(self.embedding, {"weight": weight_vD}):
            x_BSD: Tensor = type(self.embedding).forward(self.embedding, place_BS)
        if hasattr(self.embedding, TOKENS):
            x_BSD = with_new_tokens(self.embedding, tokens_BS, x_BSD)
        return x_BSD.masked_fill((place_BS != own_BS).unsqueeze(-1), 0)
