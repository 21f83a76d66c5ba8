"""Promise: no rank imports the launcher. What starts ranks and what a rank runs have nothing in common but a command
line and an environment."""

import subprocess
import sys

import pytest

RANK = """
import sys
{script}
launchers = ("onefold.launch", "onefold.cli", "torch.distributed.run")
print(sorted(name for name in sys.modules if name.startswith(launchers)))
"""
SCRIPTS = {
    "a rank": "import torch, onefold\nonefold.shard(torch.nn.Linear(2, 2), onefold.ZERO_3)",
    "a facade rank": """
import torch, onefold.deepspeed as deepspeed
deepspeed.init_distributed(verbose=False)
deepspeed.initialize(model=torch.nn.Linear(2, 2), config={"train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 3}})
""",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_rank_imports_the_launcher(script):
    code = RANK.format(script=SCRIPTS[script])
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.splitlines()[-1:] == ["[]"], result.stderr
