"""Programs that measure, each on its own: `python benchmarks/train.py`, or `python -m benchmarks.train`."""

import sys
from pathlib import Path

# They find each other beside them, as scripts do.
sys.path.insert(0, str(Path(__file__).parent))
