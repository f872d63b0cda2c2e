"""Every test runs offline: set before any import of transformers or huggingface_hub reads it."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("NO_COLOR", "1")
