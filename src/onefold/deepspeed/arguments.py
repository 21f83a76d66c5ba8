"""Owns the command-line options that DeepSpeed adds to a script's."""

from argparse import ArgumentParser


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config`, which `initialize` reads as `args`; returns `parser`."""
    group = parser.add_argument_group("DeepSpeed", "what deepspeed.initialize reads")
    group.add_argument("--deepspeed", action="store_true", help="for the script to ask whether to use it")
    group.add_argument("--deepspeed_config", default=None, metavar="FILE", help="ds_config.json")
    group.add_argument("--deepspeed_mpi", action="store_true", help="an older option, of no effect: use onefold run")
    group.add_argument("--deepscale", action="store_true", help="an older name of --deepspeed")
    group.add_argument("--deepscale_config", default=None, metavar="FILE", help="an older name of --deepspeed_config")
    return parser
