"""A causal mixture-of-experts model of transformers, of any family, with our experts in place of its own.

All else stays Hugging Face's: routers, shared experts and their gates, dense layers, attention, norms.
"""

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..experts.activation import Activation
from ..experts.expert_mlp import ExpertMLP
from ..experts.forward import Beside, current_forward, give_forwards
from ..experts.layer import DMoE
from ..experts.layout import expert_modules, read_layout
from ..experts.model_facts import SeenExperts, facts_of, give_facts
from ..experts.model_layers import moe_layers, moe_shape
from ..experts.replay import take_routes
from ..kernels.kernel_entries import KernelEntry
from ..kernels.kernel_registry import KernelNeeds
from ..linear.linear import hold_transposed
from ..util.change_order import begin_change
from ..util.errors import ExpertMeshError
from .called_layers import call_layers
from .counts import ParameterCounts, active_parameters
from .facts_cache import facts_key, keep_facts, recall
from .images import image_parameters, image_paths, see_images
from .probe import answering_host, computes_as_held, leaving_no_trace, probe, unmet_by_text

NOT_MARKED = "transformers does not mark the class of their experts"
"""Why families with mixture-of-experts layers are passed over."""


def build_model(config: Any, attn_implementation: str = "auto", images: bool = False) -> Any:
    """The model that a config of transformers describes, on the meta device, fp32, with its experts swapped.

    Parameters hold no memory yet. Buffers that no checkpoint holds, which transformers computes from the config, are
    filled already, on the CPU; the others are there too.

    Args:
        attn_implementation: as transformers has it, or "auto" (see `settled_attention`).
        images: whether the parts that images pass are in it.

    Raises:
        ExpertMeshError: transformers has no causal language model for this config or cannot build it, or it has no
            experts that transformers marks as such, or ones that are not supported; or images that are not.
    """
    from .tensor_plan import regions_of  # which asks for the layers of what is built here

    chosen = _chosen(config, images)
    model = _build(chosen, attn_implementation)
    key = facts_key(model, images)
    facts = recall(key)
    unmet = unmet_by_text(model) if facts is None or images else list(facts.left_out)
    seen = image_paths(model, unmet) if images else []
    left_out = leave_out(model, [path for path in unmet if path not in seen])
    _make_constants_buffers(model)
    if facts is None:
        fp32_names = _fp32_names(chosen, attn_implementation, left_out)
        facts = replace(probe(model), fp32_names=fp32_names, left_out=left_out)
        keep_facts(key, facts)
    _fill_buffers(model)
    _forget_earlier_rows(model)
    swap_experts(model, facts.experts)
    _check_alike(model)
    give_facts(model, facts, key)
    call_layers(model)
    give_forwards(model)
    take_routes(model)
    if images:
        see_images(model, seen)
    begin_change(model, "linear layers")
    for region in regions_of(model):
        for path in region.rowwise:
            hold_transposed(model.get_submodule(path))
    return model


def build_reference(config: Any, attn_implementation: str = "auto", dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own class of a config, with experts of its own or none, on the meta device; buffers as in
    `build_model`.

    Raises:
        ExpertMeshError: transformers has no causal language model for this config, or cannot build it.
    """
    model = _made(_chosen(config), attn_implementation, dtype)
    _make_constants_buffers(model)
    _fill_buffers(model)
    return model


def has_experts(config: Any) -> bool:
    """Whether `build_model` finds experts in the model that a config describes.

    Raises:
        ExpertMeshError: transformers cannot build it.
    """
    return any(True for _ in expert_modules(_made(_chosen(config), "eager")))


def _without_experts(model: nn.Module) -> str:
    """Why no layer of a model can be sharded over ep."""
    name = type(model).__name__
    for path, module in model.named_modules():
        if "experts" in type(module).__name__.lower() or type(module).__name__.endswith("MoE"):
            return (
                f"{name} has mixture-of-experts layers, but {NOT_MARKED} ({type(module).__name__} at "
                f"{path}) as replaceable (use_experts_implementation), so they cannot be sharded over ep. "
                "A later release of transformers may mark it; `python -m expertmesh.moe families` lists "
                "what can be trained"
            )
    return (
        f"{name} has no mixture-of-experts layer with this config; a model to train must have some: "
        "`expertmesh-checkpoints upcycle` makes them of a dense model's MLPs"
    )


@dataclass(frozen=True)
class _Chosen:
    """A config, and which of transformers' classes is made of it.

    auto: transformers' class for any config. made: the one that it makes of this config. beside: attention of the parts
    beside the language model; where they are run sdpa if the class has it, as eager attention would take memory by the
    square of an image's patches.
    """

    config: Any
    auto: Any
    made: Any
    beside: str = "eager"

    def make(self, attn_implementation: str, dtype: torch.dtype) -> Any:
        attention = self._of_parts(attn_implementation)
        config = deepcopy(self.config)
        return self.auto.from_config(config, attn_implementation=attention, dtype=dtype, trust_remote_code=False)

    def is_made(self, attn_implementation: str, dtype: torch.dtype) -> bool:
        try:
            return self.make(attn_implementation, dtype) is not None
        except Exception:  # whatever transformers says of it, it says of another attention
            return False

    def _of_parts(self, attn_implementation: str) -> str | dict[str, str]:
        """An attention for the language model, and that of other parts of the config."""
        text = self.config.get_text_config()
        parts = {name: getattr(self.config, name, None) for name in self.config.sub_configs}
        if text is self.config or not any(
            part is not None and part.get_text_config() is text for part in parts.values()
        ):
            return attn_implementation
        others = {name for name, part in parts.items() if part is None or part.get_text_config() is not text}
        return {name: self.beside if name in others else attn_implementation for name in ("", *parts)}


def _build(chosen: _Chosen, attn_implementation: str, dtype: torch.dtype = torch.float32) -> Any:
    model = _made(chosen, attn_implementation, dtype)
    if not any(True for _ in expert_modules(model)):
        raise ExpertMeshError(_without_experts(model))
    _run_on_text(model)
    _give_head(model)
    return model


def _made(chosen: _Chosen, attn_implementation: str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' class on the meta device.

    Raises:
        ExpertMeshError: it cannot be built.
    """
    config = deepcopy(chosen.config)
    _forget_plans(config)
    # HF would compute its balancing loss of all logits; ours, in router_stats.py, is over all ranks
    text_config = config.get_text_config()
    if getattr(text_config, "output_router_logits", False):
        text_config.output_router_logits = False
    with torch.device("meta"):
        attn_implementation = settled_attention(config, attn_implementation)
        chosen = replace(chosen, config=config)
        try:
            return chosen.make(attn_implementation, dtype)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            if chosen.is_made("eager", dtype):
                # of its answers the first sentence is about this model
                raise ExpertMeshError(
                    f"--attn-implementation {attn_implementation}: transformers does not run "
                    f"{config.model_type} with it ({said.partition('. ')[0].rstrip('.')}); leave it out, or give eager"
                ) from error
            raise ExpertMeshError(
                f"transformers cannot build a model of type {config.model_type} from this config.json: {said}"
            ) from error


def _forget_plans(config: Any) -> None:
    """Remove, in place, the plans of how to distribute a model over devices (`base_model_tp_plan` and others) that a
    config.json brought: those of transformers' classes hold. transformers never writes one to a file, and a wrong one
    would divide modules whose results cannot be added up."""
    for name in [name for name in vars(config) if re.fullmatch(r"base_model_\w+_plan", name)]:
        delattr(config, name)
    for part in config.sub_configs:
        if hasattr(getattr(config, part, None), "sub_configs"):
            _forget_plans(getattr(config, part))


def leave_out(model: Any, paths: Collection[str]) -> dict[str, frozenset[str]]:
    """Empty the modules at `paths`, in place: their parameters and buffers, and the modules in them, are gone, and
    checkpoints carry their tensors over.

    Beside experts, parameters that their family never trains stay: a checkpoint may hold them in one tensor with those
    of the experts that are trained.

    Returns:
        The names of these tensors, by path.
    """
    from transformers import PreTrainedModel

    before = list(model.state_dict())
    for path in paths:
        module = model.get_submodule(path)
        _empty(module, keeps_constants=any(True for _ in expert_modules(module)))
        for part in module.modules():
            if isinstance(part, PreTrainedModel):
                # asked of every model within another, where layers are checkpointed
                part.get_input_embeddings = _no_embeddings  # type: ignore[method-assign,assignment]
        if not isinstance(module, PreTrainedModel) and not any(True for _ in module.parameters()):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, nn.Module())  # a linear layer without a weight is none
    after = set(model.state_dict())
    return {
        path: frozenset(name for name in before if name.startswith(f"{path}.") and name not in after) for path in paths
    }


def _no_embeddings() -> None:
    return None


def _empty(module: nn.Module, keeps_constants: bool) -> None:
    for name, parameter in list(module._parameters.items()):
        if parameter is None or parameter.requires_grad or not keeps_constants:
            del module._parameters[name]
    module._buffers.clear()
    for name, child in list(module.named_children()):
        _empty(child, keeps_constants)
        if not any(True for _ in child.parameters()):
            del module._modules[name]


def _run_on_text(model: Any) -> None:
    """Have a model that has no forward of its own for text, but holds one that has, run the latter, in place."""
    if _predicts_tokens(model):
        return
    text = model.config.get_text_config()
    for path, part in model.named_children():
        if hasattr(part, "config") and part.config.get_text_config() is text and _predicts_tokens(part):
            begin_change(model, "text")
            model.forward = MethodType(partial(_forward_of, path), model)
            return
    raise ExpertMeshError(
        f"transformers' {type(model).__name__} (type {model.config.model_type}) does not predict "
        "next tokens: its forward takes no labels. It cannot be trained with expertmesh"
    )


def _predicts_tokens(model: Any) -> bool:
    return "labels" in inspect.signature(model.forward).parameters


def _forward_of(path: str, model: Any, *args: Any, **kwargs: Any) -> Any:
    return model.get_submodule(path)(*args, **kwargs)


def _give_head(model: Any) -> None:
    """Have a model that does not know the head of the language model in it say it, and its embedding, in place."""
    if model.get_output_embeddings() is None:
        heads = [part for part in model.modules() if hasattr(part, "get_output_embeddings")]
        owner = next((part for part in heads if part.get_output_embeddings() is not None), None)
        if owner is None:
            raise ExpertMeshError(f"transformers' {type(model).__name__} has no head that predicts tokens")
        model.get_output_embeddings, model.set_output_embeddings = (
            owner.get_output_embeddings,
            owner.set_output_embeddings,
        )
        model.get_input_embeddings = owner.get_input_embeddings


def _fp32_names(chosen: _Chosen, attn_implementation: str, left_out: Collection[str]) -> frozenset[str]:
    """Names of the parameters that `from_pretrained(dtype=torch.bfloat16)` leaves in fp32: the class names them
    (`_keep_in_fp32_modules_strict`), or a module makes them so. None where the class does not run with them:
    DeepSeek-V4's, in some releases of transformers, passes a norm's fp32 output to a matmul in bf16.

    Args:
        left_out: paths of the parts that no text passes.
    """
    model = _build(chosen, attn_implementation, torch.bfloat16)
    leave_out(model, left_out)
    plan = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(torch.bfloat16)]
    names = set()
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float32 or any(re.search(pattern, name) for pattern in plan):
            names.add(name)
            parameter.data = parameter.data.float()
    return frozenset(names) if names and computes_as_held(model) else frozenset()


def fp32_parameters(model: Any) -> dict[str, nn.Parameter]:
    """The parameters, by name, that a family keeps in fp32 beside others in bf16, both stored and computed with."""
    names = facts_of(model).fp32_names
    return {name: parameter for name, parameter in model.named_parameters() if name in names}


def _check_alike(model: nn.Module) -> None:
    routings = {(layer.shape.num_experts, layer.shape.top_k) for layer in moe_layers(model)}
    if len(routings) > 1:
        kinds = " and ".join(f"{experts} experts, top-{top_k} routing" for experts, top_k in sorted(routings))
        raise ExpertMeshError(f"one model has layers with {kinds}: not supported")


def model_class(config: Any) -> Any:
    """The class that is trained: the causal language model; or where there is none, the one that takes images too.

    Raises:
        ExpertMeshError: transformers has neither for this config.
    """
    return _chosen(config).made


def _chosen(config: Any, images: bool = False) -> _Chosen:
    """
    Args:
        images: whether the class that takes images is meant, where there is one for text alone, too.
    """
    import transformers

    of_text: list[Any] = [transformers.AutoModelForCausalLM]
    of_images: list[Any] = [transformers.AutoModelForImageTextToText, transformers.AutoModelForMultimodalLM]
    for auto in of_images + of_text if images else of_text + of_images:
        if type(config) in auto._model_mapping:
            made = auto._model_mapping[type(config)]
            return _Chosen(config, auto, made, "sdpa" if images and made._supports_sdpa else "eager")
    raise ExpertMeshError(
        f"transformers has no language model of type {config.model_type}: it cannot be trained "
        "with expertmesh (`python -m expertmesh.moe families` lists what can)"
    )


def settled_attention(config: Any, attn_implementation: str) -> str:
    """The attention that "auto" stands for: sdpa, or eager for a class that has no sdpa; any other name is itself."""
    if attn_implementation != "auto":
        return attn_implementation
    return "sdpa" if model_class(config)._supports_sdpa else "eager"


def _make_constants_buffers(model: nn.Module) -> None:
    """Make buffers of parameters that their family never trains, such as a router's correction bias in some: as in
    other families they are then neither sharded nor rounded. Likewise of parameters without elements, such as those of
    shared experts in a family that builds them for a config that has none: FSDP cannot shard them."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not (parameter.requires_grad and parameter.numel()):
                del module._parameters[name]
                module.register_buffer(name, parameter.detach(), persistent=True)


@torch.no_grad()
def _fill_buffers(model: Any) -> None:
    """Give all buffers memory, and the values that transformers' `_init_weights` computes for those that are in no
    checkpoint: `from_pretrained`, which also starts on the meta device, relies on it."""
    for owner, module in _with_models(model, model):
        if not module._buffers:
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                unset = float("nan") if buffer.is_floating_point() else 0
                module._buffers[name] = torch.full(buffer.shape, unset, dtype=buffer.dtype)
        try:
            # parameters are on the meta device: initialising them does nothing
            owner._init_weights(module)
        except Exception as error:
            raise ExpertMeshError(
                f"transformers cannot fill the buffers of {type(module).__name__} with this config: "
                f"{type(error).__name__}: {error}"
            ) from error


def _with_models(module: nn.Module, owner: Any) -> Iterator[tuple[Any, nn.Module]]:
    """Modules, each with the innermost model of transformers that has it: a part's config is not the complete one's."""
    from transformers import PreTrainedModel

    owner = module if isinstance(module, PreTrainedModel) else owner
    yield owner, module
    for child in module.children():
        yield from _with_models(child, owner)


def _forget_earlier_rows(model: Any) -> None:
    """Have rotary embeddings of type `dynamic` depend on the current batch alone, in place: by default they depend on
    the longest sequence so far, so a step would depend on the steps before it, and on evaluations between them."""
    begin_change(model, "rotary positions")
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind, rope_type in kinds.items() if isinstance(kinds, dict) else [("", kinds)]:
            if rope_type == "dynamic":
                module.register_forward_pre_hook(_ForgetRows(f"{kind}_" if kind else ""))


class _ForgetRows:
    def __init__(self, prefix: str):
        self.prefix = prefix

    def __call__(self, rotary: Any, args: Any) -> None:
        setattr(rotary, f"{self.prefix}inv_freq", getattr(rotary, f"{self.prefix}original_inv_freq"))
        setattr(rotary, f"{self.prefix}max_seq_len_cached", rotary.original_max_seq_len)


def swap_experts(model: nn.Module, seen: Mapping[str, SeenExperts]) -> None:
    """Replace each experts module by `DMoE` on the meta device, in place; its router hands it its logits.

    Args:
        seen: by the experts' paths.
    """
    begin_change(model, "experts")
    for path, experts in list(expert_modules(model)):
        if path not in seen:
            raise ExpertMeshError(f"{type(model).__name__} did not call its experts {path}; this is not supported")
        called = seen[path]
        with torch.device("meta"):
            ours = dmoe_from(experts, called.top_k, f"{type(model).__name__}.{path}")
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, ours)
        if called.beside is not None:
            ours.beside = Beside(model.get_submodule(called.beside))
        ours.correction_bias = _correction_bias(model, parent, ours.shape.num_experts)
        ours.num_choices = called.num_choices
        if called.router is not None and called.num_logits == ours.shape.num_experts:
            ours.router, ours.kind = called.router, called.kind
            take_logits(model.get_submodule(called.router), ours)


def _correction_bias(model: nn.Module, block: str, num_experts: int) -> str | None:
    """Path of the buffer, in the block around a layer's experts, that some families call a correction bias: a value per
    expert, which checkpoints hold and no gradient reaches."""
    for name, buffer in model.get_submodule(block).named_buffers(prefix=block):
        if name.endswith("bias") and buffer.numel() == num_experts and buffer.is_floating_point():
            return name
    return None


def dmoe_from(experts: Any, top_k: int, where: str) -> DMoE:
    """The replacement for an experts module of transformers, with uninitialised weights of its own. The module loses
    its parameters; its activation stays in use.

    Raises:
        ExpertMeshError: this kind of experts is not supported; `where` names it.
    """
    layout = read_layout(experts, top_k, where)
    if not 1 <= top_k <= layout.shape.num_experts:
        raise ExpertMeshError(f"{where}: {top_k} experts per token, of {layout.shape.num_experts}")
    norm = experts.post_expert_norm if getattr(experts, "has_post_expert_norm", False) else None
    for name in list(experts._parameters):
        del experts._parameters[name]
    return DMoE(ExpertMLP(layout, Activation(experts)), norm)


def take_logits(router: nn.Module, experts: DMoE) -> None:
    """Have a router that returns (logits, ...) pass its logits to the experts that it chooses from."""
    router.register_forward_hook(_LogitsTo(experts))


class _LogitsTo:
    """A hook on a router: leaves its logits with the current `Forward`, for the experts it chooses from."""

    def __init__(self, experts: DMoE):
        self.experts = experts

    def __call__(self, router: nn.Module, args: Any, output: Any) -> None:
        forward = current_forward()
        if forward is not None:
            forward.logits_TE[self.experts] = output[0].reshape(-1, self.experts.shape.num_experts)


def use_kernel(model: nn.Module, kernel: KernelEntry, most_apart: int = 1) -> None:
    """Have all experts computed by `kernel`, `most_apart` or fewer of them one after the other (see `ExpertRows`)."""
    for layer in moe_layers(model):
        layer.mlp.kernel = kernel
        layer.mlp.most_apart = most_apart


def kernel_needs(model: nn.Module, device_type: str, dtype: torch.dtype) -> KernelNeeds:
    """The requirements of this model on an expert kernel."""
    layers = moe_layers(model)
    widths = dict.fromkeys((layer.shape.model_width, layer.shape.expert_width) for layer in layers)
    is_swiglu = all(layer.mlp.is_swiglu and layer.mlp.low_rank is None for layer in layers)
    return KernelNeeds(device_type, dtype, tuple(widths), is_swiglu)


@contextmanager
def without_computing(model: Any) -> Iterator[None]:
    """Within it, a forward of a model on the meta device gives the shapes of its results; experts are not called."""
    with answering_host(), leaving_no_trace(model):
        for layer in moe_layers(model):
            layer.forward = lambda x_TD, experts_TK, weights_TK: torch.empty_like(x_TD)  # type: ignore[method-assign]
        for module in model.modules():
            module._buffers = {name: None if x is None else x.to("meta") for name, x in module._buffers.items()}
        model.eval()
        yield


def count_parameters(model: Any) -> ParameterCounts:
    """Counts of a model whose experts were swapped; it may be on the meta device."""
    of_images = image_parameters(model)
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for layer in moe_layers(model) for p in layer.mlp.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    active = active_parameters(total - sum(p.numel() for p in of_images), experts, moe_shape(model))
    frozen_experts = sum(
        p.numel() for layer in moe_layers(model) for p in layer.mlp.parameters() if not p.requires_grad
    )
    counted_apart = {id(embedding), id(head), *map(id, of_images)}
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad and id(p) not in counted_apart)
    return ParameterCounts(
        *(total, experts, embedding.numel(), head.numel(), active, facts_of(model).attention),
        frozen=active_parameters(frozen, frozen_experts, moe_shape(model)),
        frozen_head=not head.requires_grad,
    )
