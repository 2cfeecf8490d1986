"""Commands that measure."""

import sys
from pathlib import Path

# this checkout's own modules, whatever is installed
sys.path.insert(0, str(Path(__file__).parents[1] / "training" / "public"))
