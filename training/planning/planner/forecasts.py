"""What is asked of dry runs, and what they answered before: of a model's facts, and of a rank's step. Several are run
side by side."""

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import MISSING, fields, replace
from typing import Any, Literal, TypeVar

from ....moe.dispatch.dispatcher_entries import DISPATCHERS
from ....moe.kernels.kernel_entries import KERNELS
from ....moe.util.child import cores, forks_compute, leave_inherited
from ....moe.util.errors import ExpertMeshError
from ....moe.util.step_parts import has_modules_from_outside
from ....sharding.parallelize.choices import Checkpointing
from ....sharding.pipeline.balance import cut_stages
from ...config.optimizers import OUR_OPTIMIZERS
from ...config.train_config import TrainConfig, read_by
from ..coverage import NOT_MODELLED
from . import kept
from .account import Account
from .asked import Asked
from .facts import Cuts, ModelFacts

KNOWN_ATTENTION = ("auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Values of `--attn-implementation` whose functions are in transformers' or our sources."""
LAYER_KINDS_MODULE = f"{__package__.removesuffix('.planning.planner')}.attention.layer_kinds"
LAYOUT: Mapping[str, Any] = {
    "ep_size": 1, "dense_shard": "full", "cp_size": 1, "tp_size": 1, "pp_size": 1, "pipeline_chunks": 1,
    "pipeline_schedule": None, "pipeline_layers": None, "per_device_train_batch_size": 1, "max_seq_length": 1024,
    "global_batch_size": None, "gradient_accumulation_steps": 1, "dispatch": "auto", "overlap_chunks": 1,
    "ranks_per_node": None,
}  # fmt: skip
"""Settings on which a model's facts do not depend."""

T = TypeVar("T")


def _tell_nobody(what: str, done: int, number: int) -> None:
    """A function with a name, as forecasts are handed to other processes."""


class Forecasts:
    """Answers of one model.

    Args:
        said: all that the model's config says. load: returns transformers' config object; called only if there is
            something to be run.
        is_kept: whether answers go to the cache directory, and come from there.
        tell: tell(what, done, number) is called with what is being done, and how many of a number are.
    """

    def __init__(
        self,
        said: Mapping[str, Any],
        load: Callable[[], Any],
        device: Literal["cuda", "cpu"] = "cuda",
        is_kept: bool = True,
        tell: Callable[[str, int, int], object] = _tell_nobody,
    ):
        self.said, self.load, self.device, self.is_kept = kept.of_model(said), load, device, is_kept
        self.tell = tell
        self._found: dict[str, Any] = {}

    def facts(self, config: TrainConfig) -> ModelFacts:
        """
        Raises:
            ExpertMeshError: the model cannot be built, or not trained with these flags.
        """

        def of(engine: Any) -> Callable[..., ModelFacts]:
            def find(whole: TrainConfig, *of_model: Any) -> ModelFacts:
                found: ModelFacts = engine.rehearsed_facts(whole, *of_model)
                if _leaves_kernel_open(whole):
                    # a dry run asks with the kernel that was chosen, whose facts these are
                    self._remember(found, replace(whole, expert_kernel=found.kernel), "facts")
                return found

            return find

        return self._of_model(ModelFacts, "facts", config, of)

    def cuts(self, config: TrainConfig) -> Cuts:
        """
        Raises:
            ExpertMeshError: the model cannot be cut into stages.
        """
        return self._of_model(Cuts, "cuts", config, lambda engine: engine.cuts_of)

    def account(self, asked: Asked) -> Account:
        """
        Raises:
            ExpertMeshError: the model cannot compute this.
        """
        asked = self.settled(asked)

        def find() -> Account:
            from ..rehearsal.engine import account_of

            return account_of(asked, self.load(), self.facts(asked.config))

        return self._once(Account, find, *_key(asked))

    def known(self, asked: Asked) -> Account | None:
        """The answer that was given before, if any."""
        found = self._known(Account, *_key(self.settled(asked)))
        return found if isinstance(found, Account) else None

    def accounts(self, several: Sequence[Asked]) -> list[Account | ExpertMeshError]:
        """The same of several at once, with what refuses them; side by side in as many processes as there are cores."""
        settled = [self.settled(asked) for asked in several]
        found = {number: self._known(Account, *_key(asked)) for number, asked in enumerate(settled)}
        missing = [number for number, known in found.items() if known is None]

        def tell(done: int) -> None:
            self.tell("dry-running layouts", done, len(missing))

        if missing:
            tell(0)
        if len(missing) < 2 or cores() == 1 or not forks_compute():
            for done, number in enumerate(missing, 1):
                found[number] = _account(self, several[number])
                tell(done)
        else:
            with side_by_side() as pool:
                self.load(), self.facts(several[0].config)
                futures = {pool.submit(_account, self, settled[number]): number for number in missing}
                for done, future in enumerate(as_completed(futures), 1):
                    number, account = futures[future], future.result()
                    # which is in the cache directory already
                    found[number] = self._found[self._name(*_key(settled[number]))] = account
                    tell(done)
        return [account for account in found.values() if account is not None]

    def all_accounts(self, several: Sequence[Asked]) -> list[Account]:
        """The same where none is refused.

        Raises:
            ExpertMeshError: one of them is.
        """
        accounts = []
        for account in self.accounts(several):
            if isinstance(account, ExpertMeshError):
                raise account
            accounts.append(account)
        return accounts

    def with_stages(self, config: TrainConfig) -> TrainConfig:
        """The same with the layers that each stage of a pipeline has in a run: those given, or those that a run takes
        by itself.

        Raises:
            ExpertMeshError: the model cannot be cut so.
        """
        if config.pp_size == 1:
            return config
        stages = cut_stages(self.cuts(config), config.pp_size, config.pipeline_chunks, config.layers_of_stages)
        return replace(config, pipeline_layers=",".join(str(len(each)) for each in stages))

    def settled(self, asked: Asked) -> Asked:
        """The same with what a run would choose by itself, and nothing on which no figure depends."""
        config, routing = alike(self.with_stages(asked.config.settled())), asked.routing
        if not config.packing:
            routing = replace(routing, samples=1)
        cluster = replace(asked.cluster, gpus_per_node=min(asked.cluster.gpus_per_node, asked.world_size))
        # those that a run has are not known to every caller
        micro_batches = asked.config.micro_batches(asked.world_size)
        config = replace(config, global_batch_size=None, gradient_accumulation_steps=micro_batches)
        if _leaves_kernel_open(config):
            config = replace(config, expert_kernel=self.facts(config).kernel)
        return replace(asked, config=config, cluster=cluster, routing=routing, device=self.device)

    def _of_model(self, kind: type[T], name: str, config: TrainConfig, of: Callable[[Any], Callable[..., T]]) -> T:
        # layers that keep products are of a kind of their own
        way: Checkpointing = "selective" if config.keep_expert_products else "none"
        whole = replace(alike(config), **LAYOUT, gradient_checkpointing=way, offload_activations=False)

        def find() -> T:
            self.tell("looking at the model's layers", 0, 0)
            from ..rehearsal import engine

            return of(engine)(whole, self.load(), self.device)

        return self._once(kind, find, whole, name)

    def _once(self, kind: type[T], find: Callable[[], T], *key: Any) -> T:
        found = self._known(kind, *key)
        if found is None:
            found = _tried(find)
            self._remember(found, *key)
        if isinstance(found, ExpertMeshError):
            raise found
        return found

    def _remember(self, found: Any, *key: Any) -> None:
        self._found[self._name(*key)] = found
        if self._is_kept(key) and _lasts(found):
            kept.keep(found, self._name(*key))

    def _known(self, kind: type[T], *key: Any) -> T | ExpertMeshError | None:
        name = self._name(*key)
        if name not in self._found and self._is_kept(key) and (known := kept.known(kind, name)) is not None:
            self._found[name] = known
        found: T | ExpertMeshError | None = self._found.get(name)
        return found

    def _name(self, *key: Any) -> str:
        return kept.key_of(self.said, self.device, *key)

    def _is_kept(self, key: Sequence[Any]) -> bool:
        (config,) = (each for each in key if isinstance(each, TrainConfig))
        return self.is_kept and not has_code_from_outside(config)


def _key(asked: Asked) -> tuple[Any, ...]:
    # how much memory a card has changes no figure
    hardware = replace(asked.cluster.hardware, name="", device=replace(asked.cluster.hardware.device, memory=0.0))
    return asked.config, hardware, asked.cluster.gpus_per_node, asked.world_size, asked.rank, asked.routing


def _leaves_kernel_open(config: TrainConfig) -> bool:
    """Whether the experts' kernel is one that the model's facts tell."""
    return config.expert_precision != "fp8" and config.expert_kernel == "auto"


def _account(forecasts: Forecasts, asked: Asked) -> Account | ExpertMeshError:
    return _tried(lambda: forecasts.account(asked))


def _tried(find: Callable[[], T]) -> T | ExpertMeshError:
    try:
        return find()
    except ExpertMeshError as error:
        return error


def _lasts(found: Any) -> bool:
    """Whether another process would find the same: figures, or what a check refuses. What else was raised may be this
    machine's: it has too little memory, or a package is missing."""
    error = found
    while isinstance(error, ExpertMeshError) and error.__cause__ is not None:
        error = error.__cause__
    return not isinstance(error, BaseException) or isinstance(error, ExpertMeshError)


@contextmanager
def side_by_side() -> Iterator[ProcessPoolExecutor]:
    """Processes that know all that this one has imported."""
    # imported once for all of them
    from ....moe.util.threads import on_one_thread
    from ..rehearsal import engine

    assert engine
    forks = multiprocessing.get_context("fork")
    with on_one_thread(), ProcessPoolExecutor(cores(), forks, initializer=leave_inherited) as pool:
        yield pool


def alike(config: TrainConfig) -> TrainConfig:
    """The config with all settings at their defaults on which no figure depends, so that none depends on a setting that
    its file's name does not have."""
    # --elastic needs --resume, and says nothing of a step whose layout is known
    names = read_by("plan") - NOT_MODELLED.keys() - {"elastic"}
    changes: dict[str, Any] = {"model": "-", "dataset": ["-"]}
    for field in fields(config):
        if field.name not in names | changes.keys() and field.init:
            changes[field.name] = field.default if field.default_factory is MISSING else field.default_factory()
    return replace(config, **changes)


def has_code_from_outside(config: TrainConfig) -> bool:
    """Whether figures may depend on code that is not of this project, or of transformers."""
    # that module imports torch; where it is not imported, nobody has registered a kind of layers
    layer_kinds = sys.modules.get(LAYER_KINDS_MODULE)
    return (
        has_modules_from_outside()
        or KERNELS.has_entries_from_outside()
        or DISPATCHERS.has_entries_from_outside()
        or config.optimizer_entry not in OUR_OPTIMIZERS
        or config.attn_implementation not in KNOWN_ATTENTION
        or (layer_kinds is not None and layer_kinds.has_layer_kinds_from_outside())
    )
