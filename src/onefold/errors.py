"""Owns every error Onefold raises on purpose.

Each message names what the reader can act on - the parameter or module, the rank, what was expected - and the
way out. The tree:

    OnefoldError
    ├── PlanError               a table that breaks a law, or asks for a tier this build lacks
    ├── PrecisionError          a dtype or loss scale that has no meaning here
    ├── ShardError              shard() cannot take this model (already sharded, no parameters, meta without an init)
    ├── ReleasedParameterError  a parameter was read while its values rest in shards
    ├── ReducedGradientError    a gradient was read after it was reduced into shards
    ├── OrderMismatchError      ranks use units in different orders
    ├── OptimizerError          an optimizer that cannot work on flat shards, or does not match the model
    ├── LossScaleError          the loss scale cannot be lowered any further
    ├── HostMemoryError         the host tier does not get the memory it needs
    ├── CheckpointError         a checkpoint cannot be written, is damaged, or does not fit the model
    ├── WeightsError            files of weights that cannot be written, read, or matched with the model
    ├── ConfigError             a DeepSpeed configuration that is no JSON, has unknown or wrong keys, or asks too much
    ├── EngineError             a DeepSpeed engine is used as it cannot be
    └── LaunchError             `onefold run` cannot start what was asked for
"""


class OnefoldError(RuntimeError):
    """Base of all errors that Onefold raises on purpose."""


class PlanError(OnefoldError, ValueError):
    """A plan breaks one of the three laws, or asks for what this build cannot place."""


class PrecisionError(OnefoldError, ValueError):
    """A precision setting has no meaning here."""


class ShardError(OnefoldError):
    """`shard` cannot take this model, mesh or unit choice."""


class ReleasedParameterError(OnefoldError):
    """A parameter was used while its values rest in shards."""


class ReducedGradientError(OnefoldError):
    """A gradient was used as a whole tensor after it had been reduced into shards."""


class OrderMismatchError(OnefoldError):
    """Ranks use units in different orders, so their collectives cannot be matched."""


class OptimizerError(OnefoldError, ValueError):
    """An optimizer cannot run on flat shards, or does not belong to this model."""


class LossScaleError(OnefoldError):
    """The dynamic loss scale is at its minimum and the gradients still overflow."""


class CheckpointError(OnefoldError):
    """A checkpoint cannot be written, is not whole, or does not fit what it is loaded into."""


class HostMemoryError(OnefoldError, MemoryError):
    """The host tier needs more memory than there is, or than the system lets it lock."""


class WeightsError(OnefoldError):
    """Files of weights cannot be written or read, or do not match the model."""


class ConfigError(OnefoldError, ValueError):
    """A DeepSpeed configuration cannot be read, or asks for what Onefold does not do; names every key concerned."""


class EngineError(OnefoldError):
    """A DeepSpeed engine is asked for what it cannot do, or at the wrong moment."""


class LaunchError(OnefoldError, ValueError):
    """A run cannot be started as asked: hostfile, options that contradict each other, a port in use."""
