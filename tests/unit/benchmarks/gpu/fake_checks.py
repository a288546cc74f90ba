"""Checks of a few milliseconds, run as `check.py` runs the real ones."""

import argparse
import json
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("name")
for option in ("--device", "--size", "--work", "--limit", "--dimensions"):
    parser.add_argument(option, required=True)
parser.add_argument("--data", type=Path, required=True)
parser.add_argument("--results", type=Path, required=True)
options = parser.parse_args()
if options.name == "breaks":
    sys.exit("a | b is wrong")
options.data.write_text(json.dumps({"summary": [f"{options.name} on {options.device}"]}))
if options.name == "hangs":
    time.sleep(60)
if options.name == "reads":
    report = json.loads(options.results.read_text())
    options.data.write_text(json.dumps(report["checks"]["works"]["data"]))
