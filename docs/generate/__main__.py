"""Make the tables and figures of the documents from the result files: `python docs/generate [--check]`."""

import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a folder, this file does not know its package
sys.exit(import_module("generate.build").main())
