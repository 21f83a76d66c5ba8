"""DeepSpeed's module `pipe`, refused."""

from onefold.deepspeed.unsupported_names import unsupported

_WHY = ("there is no pipeline parallelism", "stage 3, for a model that does not fit")
PipelineModule = unsupported("pipe.PipelineModule", *_WHY)
LayerSpec = unsupported("pipe.LayerSpec", *_WHY)
TiedLayerSpec = unsupported("pipe.TiedLayerSpec", *_WHY)
ProcessTopology = unsupported("pipe.ProcessTopology", *_WHY)
