"""DeepSpeed's module `pipe`, refused."""

from onefold.deepspeed.refused import refused

_WHY = ("there is no pipeline parallelism", "stage 3, for a model that does not fit")
PipelineModule = refused("pipe.PipelineModule", *_WHY)
LayerSpec = refused("pipe.LayerSpec", *_WHY)
TiedLayerSpec = refused("pipe.TiedLayerSpec", *_WHY)
ProcessTopology = refused("pipe.ProcessTopology", *_WHY)
