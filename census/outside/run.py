"""Run the catalogue: python run.py --draw SEED --out FILE.json [--only NAME] [--models FOLDER]."""

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    sys.path.append(str(HERE.parent))
    importlib.import_module(f"{HERE.name}.program").main()
