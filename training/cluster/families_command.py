"""Which families of models can be trained here: `python -m expertmesh.moe families [FAMILY ...]`.

Each is built from its default config on the meta device, with our experts in place of its own, and run there once;
nothing is downloaded, and no memory held. `--table` prints, in Markdown, which ways of training each supports, and also
takes directories, config.json files and hub ids, of which it reads config.json alone.
"""

import sys
from collections.abc import Collection, Iterator, Sequence

from ...moe.util.command import run_command
from ...moe.util.errors import ExpertMeshError
from ...moe.util.parser import Parser
from ...moe.util.terminal import ends_with_reader, folded

_DESCRIPTION = """\
One line per model family: its class, how many layers have experts, and whether
it is supported, or why not. "?" stands for a family whose default config makes
no model: ask about one of its models."""


@ends_with_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit code 0, or 2 after a mistake in the flags."""
    parser = Parser(prog="python -m expertmesh.moe", description="Which model families can be trained here.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    families: Parser = commands.add_parser(
        "families",
        usage="%(prog)s [--table] [FAMILY ...]",
        help="one line per family: class, layers with experts, supported or why not",
        description=_DESCRIPTION,
    )
    families.add_argument(
        "family", metavar="FAMILY", nargs="*", help="model types (default: all that the installed transformers has)"
    )
    families.add_argument(
        "--table",
        action="store_true",
        help="print in Markdown which ways of training each supports; FAMILY may also be a directory, a config.json or "
        "a hub id",
    )
    try:
        arguments = parser.parse_args(argv)
    except ExpertMeshError as error:
        print(f"moe: error: {error}", file=sys.stderr)
        return 2

    import transformers

    from ...moe.hf_model.families import causal_families

    # logs of packages that would make some families faster, once each is built
    transformers.logging.set_verbosity_error()
    known = causal_families()
    unknown = [family for family in arguments.family if family not in known]
    if arguments.table:
        return print_support(arguments.family or known, unknown)
    if unknown:
        print(
            f"moe: error: {unknown[0]}: transformers has no causal mixture-of-experts model of that "
            f"name; known: {', '.join(known)}",
            file=sys.stderr,
        )
        return 2
    for line in table(arguments.family or known):
        print(folded(line), flush=True)
    return 0


def print_support(names: Sequence[str], models: Collection[str]) -> int:
    """Print the table of support; returns the exit code. models: those of the names that are no family's."""
    from transformers import CONFIG_MAPPING

    from ..planning.planner.model_config import find_config
    from .support import markdown

    try:
        configs = [find_config(name).load() if name in models else CONFIG_MAPPING[name]() for name in names]
    except ExpertMeshError as error:
        print(f"moe: error: {str(error).removeprefix('--model ')}", file=sys.stderr)
        return 2
    for line in markdown(zip(names, configs, strict=True), "model"):
        print(line, flush=True)
    return 0


def table(families: Sequence[str]) -> Iterator[str]:
    """Lines of the table, each as soon as it is known."""
    from ...moe.hf_model.families import describe_family

    yield f"{'family':20}{'class':34}{'layers with experts':21}{'experts':14}supported"
    for family in families:
        facts = describe_family(family)
        if isinstance(facts, str):
            yield f"{family:20}{facts}"
            continue
        layers, experts = f"{facts.moe_layers} of {facts.layers}", f"{facts.top_k} of {facts.num_experts}"
        yield f"{family:20}{facts.class_name:34}{layers:21}{experts:14}yes"


if __name__ == "__main__":
    run_command(main)
