"""Checks of a few milliseconds, run as `check.py` runs the real ones."""

import argparse
import json
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("name")
for option in ("--device", "--size", "--work", "--limit"):
    parser.add_argument(option, required=True)
parser.add_argument("--data", type=Path, required=True)
options = parser.parse_args()
if options.name == "breaks":
    sys.exit("a | b is wrong")
if options.name == "hangs":
    time.sleep(60)
options.data.write_text(json.dumps({"summary": [f"{options.name} on {options.device}"]}))
