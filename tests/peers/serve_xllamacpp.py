"""Serve a GGUF file with llama.cpp's own server, which xllamacpp holds: python serve_xllamacpp.py FILE PORT KEY."""

from __future__ import annotations

import sys
import threading

import xllamacpp

NUM_SLOTS = 2
"""Fewer than streams are asked for: some have to wait."""
SLOT_TOKENS = 2048

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.port = int(sys.argv[2])
params.api_keys = [sys.argv[3]]
params.n_parallel = NUM_SLOTS
params.n_ctx = NUM_SLOTS * SLOT_TOKENS
server = xllamacpp.Server(params)
threading.Event().wait()
